"""The file of one request that an engine's connector writes and the recorder reads.

A safetensors file: "token_ids" I64 [n], "hidden_states" [n, L, W] in the engine's dtype, for the L
layers and the n tokens that were read: prompt and continuation without its last token. Its metadata
are a `StatesHead`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from ...quantize.errors import CheckpointError
from ...quantize.files.safetensors_header import read_header
from ...recipes.errors import short
from ..errors import TraceError
from ..traces.manifest import FeatureDtype
from ..traces.names import is_printable_name
from ..traces.prompt_trace import FEATURE_DTYPES

STATES_KEY = "draftquant_states"
"""In `kv_transfer_params`: of a request the session that asks, of its answer the file's name."""
SESSION = re.compile(r"[0-9a-f]{16}")
"""The session's hex digits stand before its files' names: what nobody fetched can be removed."""
FOLDER_KEY = "draftquant_folder"
"""In the connector's extra configuration: where files are written."""
FAILED = ".failed"
"""The suffix of the file that says why another is not coming."""
UNFINISHED = ".unfinished"
"""The suffix of a file that is being written."""

_AGAIN = "start the engine with the arguments of 'draftquant record --print-server-args'"


def layer_inputs(aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids by which vLLM knows the outputs of these layers.

    Ours count layers by their outputs, vLLM's by their inputs: what layer i gives is the input of
    layer i + 1, and behind the last layer, before the final norm, that of none.
    """
    return tuple(i + 1 for i in aux_layer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesHead:
    """What a file says of itself.

    Attributes:
        layer_inputs: see the function of this name, ascending.
        engine: name and version.
    """

    layer_inputs: tuple[int, ...]
    engine: str

    def metadata(self) -> dict[str, str]:
        """As safetensors' metadata."""
        return {"layer_inputs": " ".join(map(str, self.layer_inputs)), "engine": self.engine}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStates:
    """What the file of a request must hold.

    Attributes:
        aux_layer_ids: as we count. width: of one layer.
    """

    aux_layer_ids: tuple[int, ...]
    width: int
    dtype: FeatureDtype

    @property
    def bytes_per_token(self) -> int:
        """Of hidden states."""
        return len(self.aux_layer_ids) * self.width * FEATURE_DTYPES[self.dtype][0].itemsize


def check_states(path: Path, expected: ExpectedStates, token_ids: Sequence[int]) -> str:
    """Check the header of a file, and that its tokens are these.

    Args:
        expected: what it must hold.
        token_ids: prompt and continuation, without its last token.

    Returns:
        The engine that wrote it.

    Raises:
        TraceError: the file is truncated, or of other layers, widths or tokens.
    """
    try:
        header = read_header(path.parent, path.name)
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix="record again: its prompt is repeated") from exc
    shape = (len(token_ids), len(expected.aux_layer_ids), expected.width)
    floats = FEATURE_DTYPES[expected.dtype][1]
    wanted = {"token_ids": ("I64", shape[:1]), "hidden_states": (floats, shape)}
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for name, tensor in wanted.items():
        if found.get(name) != tensor:
            got = f"{found[name][0]} {list(found[name][1])}" if name in found else "no such tensor"
            what = f"{name}: expected {tensor[0]} {list(tensor[1])}, got {got}"
            raise TraceError(path, what, fix=_AGAIN)
    ids = " ".join(map(str, layer_inputs(expected.aux_layer_ids)))
    if header.metadata.get("layer_inputs") != ids:
        got = short(header.metadata.get("layer_inputs"))
        raise TraceError(path, f"expected the inputs of layers {ids}, got {got}", fix=_AGAIN)
    engine = header.metadata.get("engine")
    if not is_printable_name(engine):
        raise TraceError(path, f"expected the name of an engine, got {short(engine)}", fix=_AGAIN)
    with safe_open(path, "pt") as file:
        written = file.get_tensor("token_ids").tolist()
    if written != list(token_ids):
        raise TraceError(path, "its tokens are not those of the request's answer",
                         fix="give each recorder a shared folder of its own")  # fmt: skip
    return engine


def read_features(path: Path) -> Tensor:
    """The states of a checked file as features: [n, L * W], the layers side by side."""
    with safe_open(path, "pt") as file:
        states: Tensor = file.get_tensor("hidden_states")
    return states.flatten(1)
