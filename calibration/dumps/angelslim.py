"""AngelSlim's offline features: `rank_0/rows_0-5000/data_0.ckpt`, for DFlash `sample_0_rank0.ckpt`.

    input_ids, loss_mask   [1, N]
    hidden_states          [1, N, m W]: these are the aux ones
    target_hiddens         [1, N, W], after the norm; not for DFlash
    and attention_mask, position_ids, inputs_embeds, which are not needed

Source: Tencent/AngelSlim 67394ce, tools/generate_hidden_for_draft_model.py and
tools/generate_dflash_data.py.
"""

from collections.abc import Sequence
from pathlib import Path

from .dump_files import find_files, load_tensors, pending, stored_sample
from .sample import Pending, Sample


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        loaded = load_tensors(file)
        return stored_sample(file, dump, loaded, aux="hidden_states", last="target_hiddens")

    written_by = "generate_hidden_for_draft_model.py"
    return pending(find_files(dump, (".ckpt",), written_by=written_by), load)
