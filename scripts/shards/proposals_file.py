"""What drafts propose along the prompts of a shard, as files; and what computed it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.staging import sync
from ...recipes.regular_file import open_stream
from .work_shard import ShardError

if TYPE_CHECKING:
    import torch

    from ...calibration.passes.predictions import Proposals
    from ...validate.counting.replay_cache import Question


def arithmetic_of(device: "torch.device") -> Mapping[str, str]:
    """What rounds otherwise on another machine, as text."""
    from ...validate.counting.replay_cache import arithmetic

    return {name: str(found) for name, found in arithmetic(device).items()}


def write_proposals(folder: Path, draft: int, proposals: "Sequence[Proposals]") -> None:
    """Write what a draft proposes.

    Args:
        folder: of a result.
        draft: its position in the command, from 0.
        proposals: in the order of the shard's prompts.
    """
    from ...validate.counting.replay_cache import encoded

    path = _path(folder, draft)
    path.write_bytes(encoded(proposals))
    sync(path)


def read_proposals(
    folder: Path, draft: int, asked: "Question", positions: Sequence[int]
) -> "list[Proposals]":
    """Read what was written for prompts at these positions.

    Raises:
        ShardError: these are no proposals for them.
    """
    from ...validate.counting.replay_cache import decoded

    path = _path(folder, draft)
    with open_stream(path) as stream:
        found = decoded(stream.read(), asked, positions)
    if found is None:
        raise ShardError(path, "these are no proposals for the prompts of its shard",
                         fix=f"rm -r {folder}, and run the shard again")  # fmt: skip
    return found


def _path(folder: Path, draft: int) -> Path:
    return folder / f"proposals-{draft + 1}.bin"
