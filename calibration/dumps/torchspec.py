"""TorchSpec's offline files: `*.ckpt`, read by its OfflineEagle3Dataset.

    input_ids, loss_mask   [N]
    aux_hidden_states      [1, N, 3 W]
    hidden_states          [1, N, W], the last ones; before the norm where vLLM computed them

TorchSpec itself writes none of these (its features go through a store in memory): they come from
scripts around it. What `save_debug_train_data` writes is a batch of training, shifted and padded.

Source: torchspec-project/TorchSpec 6dda2bf, torchspec/data/preprocessing.py, utils/train_dump.py.
"""

from collections.abc import Sequence
from pathlib import Path

from ..errors import TraceError
from .dump_files import find_files, load_tensors, pending, stored_sample
from .sample import Pending, Sample


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""

    def load(file: Path) -> Sample:
        loaded = load_tensors(file)
        if "batch" in loaded and "batch_idx" in loaded:
            raise TraceError(
                file,
                "a debug dump of training: its tokens are shifted and padded",
                fix="give the folder that training reads",
            )
        return stored_sample(file, dump, loaded, aux="aux_hidden_states", last="hidden_states")

    return pending(find_files(dump, (".ckpt", ".pt"), written_by="TorchSpec's preparation"), load)
