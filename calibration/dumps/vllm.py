"""What vLLM's ExampleHiddenStatesConnector writes: `{request}.safetensors`, a lock file beside it.

    token_ids       [N] int64, of the prompt; with include_output_tokens also of the answer, without
                    its last token, which was never read
    hidden_states   [N, m, W], one slot for each id in eagle_aux_hidden_state_layer_ids, which count
                    before the layer: the number of layers is the output of the last, unnormed

Nothing says where the prompt ends.

Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

from collections.abc import Sequence
from pathlib import Path

from .dump_files import find_files, load_safetensors, pending, sample_name
from .sample import Pending, Sample, make_sample

NAMES = ("token_ids", "hidden_states")


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        loaded = load_safetensors(file, NAMES)
        return make_sample(
            file,
            sample_name(file, dump),
            token_ids=loaded["token_ids"],
            answered=None,
            aux=loaded["hidden_states"],
            last=None,
        )

    return pending(find_files(dump, (".safetensors",), written_by="vLLM"), load)
