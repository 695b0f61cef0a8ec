"""SpecForge's offline features: `rows_0-2000/data_0.ckpt`, or `.ckpt.gz` with --compress.

    input_ids, loss_mask   [N]
    aux_hidden_state       [1, N, 3 W]   eagle3, p-eagle; hidden_state [1, N, W] beside it
    hidden_states          [1, N, m W]   dflash, dspark: these are the aux ones; dspark has
                                         target_last_hidden_states [1, N, W] beside them

Texts are captured in batches and padded behind with token 0 up to the longest, without a word in
the file: the loss mask is 0 there. The last states are those that the head reads, after the norm.

Source: sgl-project/SpecForge a6b6b02, scripts/prepare_hidden_states.py, specforge/data/utils.py,
specforge/algorithms/*/providers.py.
"""

from collections.abc import Sequence
from pathlib import Path

from .dump_files import find_files, load_tensors, pending, stored_sample
from .sample import Pending, Sample


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        loaded = load_tensors(file)
        eagle = "aux_hidden_state" in loaded
        aux, last = (
            ("aux_hidden_state", "hidden_state")
            if eagle
            else ("hidden_states", "target_last_hidden_states")
        )
        return stored_sample(file, dump, loaded, aux=aux, last=last)

    files = find_files(dump, (".ckpt", ".ckpt.gz"), written_by="prepare_hidden_states.py")
    return pending(files, load)
