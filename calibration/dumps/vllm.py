"""What vLLM's ExampleHiddenStatesConnector writes: `{request}.safetensors`, a lock file beside it.

    token_ids       [N] int64, of the prompt; with include_output_tokens also of the answer, without
                    its last token, which was never read
    hidden_states   [N, m, W], one slot for each id in eagle_aux_hidden_state_layer_ids, which count
                    before the layer: the number of layers is the output of the last, unnormed

Nothing says where the prompt ends.

speculators' FP8HiddenStatesConnector writes the same, rounded to FP8:

    hidden_states         F8_E4M3 [N, m, W]
    hidden_states_scales  F32 [N, 1, 1], the largest magnitude of the token in any slot / 448

A hidden state is code * scale. Here the product is taken in float32 and rounded once to BF16;
speculators' FP8Transfer rounds the scale to BF16 first, which moves a value by up to 0.8 %.

Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py;
hs-connectors 0.9.0, fp8_hidden_states_connector.py, fp8_utils.py, transfer.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...quantize.numerics.number_formats import FP8
from ...recipes.errors import TraceError
from .samples import (
    AGAIN,
    Pending,
    Sample,
    find_files,
    load_safetensors,
    make_sample,
    pending,
    sample_name,
)

_SCALES = "hidden_states_scales"


class States(NamedTuple):
    """A file: token_ids [N], states [N, m, W], scales [N] of states that were rounded to FP8."""

    token_ids: Tensor
    states: Tensor
    scales: Tensor | None


def load_states(file: Path) -> States:
    """Read a file of either connector.

    Raises:
        TraceError: it is damaged, or its scales are not one positive number for each token.
    """
    loaded = load_safetensors(file, ("token_ids", "hidden_states"), beside=(_SCALES,))
    ids, states, scales = loaded["token_ids"], loaded["hidden_states"], loaded.get(_SCALES)
    if (scales is None) != (states.dtype != FP8):
        dtype = str(states.dtype).removeprefix("torch.")
        what = f"hidden_states are {dtype}, {'with' if scales is not None else 'without'} {_SCALES}"
        raise TraceError(file, what, fix=AGAIN)
    if scales is None:
        return States(ids, states, None)
    expected = (len(states), 1, 1)
    if states.dim() != 3 or tuple(scales.shape) != expected or scales.dtype != torch.float32:
        what = f"{_SCALES}: expected F32 {list(expected)}, got {list(scales.shape)}"
        raise TraceError(file, what, fix=AGAIN)
    if not bool(((scales > 0) & torch.isfinite(scales)).all()):
        raise TraceError(file, f"{_SCALES}: expected positive numbers", fix=AGAIN)
    return States(ids, (states.float() * scales).bfloat16(), scales.flatten())


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        loaded = load_states(file)
        return make_sample(
            file,
            sample_name(file, dump),
            token_ids=loaded.token_ids,
            answered=None,
            aux=loaded.states,
            last=None,
            scales=loaded.scales,
        )

    return pending(find_files(dump, (".safetensors",), written_by="vLLM"), load)
