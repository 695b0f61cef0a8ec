"""ModelOpt's offline features: `{conversation_id}.pt`.

    input_ids           [N]
    aux_hidden_states   [N, m W]
    hidden_states       [N, W], the last ones; after the norm from transformers, before it from vLLM
    loss_mask           [N], all 1 without --answer-only-loss; none from TensorRT-LLM
    conversation_id     text or a number

Source: NVIDIA/Model-Optimizer a2fbac7, examples/speculative_decoding/collect_hidden_states/.
"""

from collections.abc import Sequence
from pathlib import Path

from .dump_files import find_files, load_tensors, pending, stored_sample
from .sample import Pending, Sample


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        return stored_sample(
            file,
            dump,
            load_tensors(file),
            aux="aux_hidden_states",
            last="hidden_states",
            masked=False,
        )

    return pending(find_files(dump, (".pt",), written_by="compute_hidden_states_*.py"), load)
