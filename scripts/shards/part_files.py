"""What a part computed, as files: proposals of a draft, or numbers; and what computed it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.staging import sync, write_text
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from .parts import ShardError

if TYPE_CHECKING:
    import torch

    from ...calibration.passes.predictions import Proposals
    from ...validate.counting.replay_cache import Question
    from ...validate.tuning.measured_mixtures import Numbers

_PROPOSALS, _NUMBERS = "proposals.bin", "numbers.json"


def arithmetic_of(device: "torch.device") -> Mapping[str, str]:
    """What rounds otherwise on another machine, as text."""
    from ...validate.counting.replay_cache import arithmetic

    return {name: str(found) for name, found in arithmetic(device).items()}


def write_proposals(folder: Path, proposals: "Sequence[Proposals]") -> None:
    """Write what a draft proposes along the prompts of a part, in their order."""
    from ...validate.counting.replay_cache import encoded

    path = folder / _PROPOSALS
    path.write_bytes(encoded(proposals))
    sync(path)


def read_proposals(folder: Path, positions: Sequence[int], asked: "Question") -> "list[Proposals]":
    """Read what was written for prompts at these positions.

    Raises:
        ShardError: these are no proposals for them.
    """
    from ...validate.counting.replay_cache import decoded

    path = folder / _PROPOSALS
    try:
        with open_stream(path) as stream:
            found = decoded(stream.read(), asked, positions)
    except OSError as exc:
        raise _no_result(path, str(exc)) from exc
    if found is None:
        raise _no_result(path, "these are no proposals for the prompts of its part")
    return found


def write_numbers(folder: Path, numbers: "Sequence[Numbers]") -> None:
    """Write what was measured of the drafts of a part, in their order."""
    write_text(folder / _NUMBERS, json.dumps({"numbers": numbers}))


def read_numbers(folder: Path, positions: Sequence[int]) -> "list[Numbers]":
    """Read what was measured of drafts at these positions.

    Raises:
        ShardError: these are no such numbers.
    """
    path = folder / _NUMBERS
    try:
        (found,) = parse_object(read_text(path)).values()
        numbers: list[Numbers] = list(decode(tuple[Mapping[str, float], ...], found))
    except (OSError, JsonProblem, ValueError) as exc:
        raise _no_result(path, f"cannot be read: {exc}") from exc
    if len(numbers) != len(positions):
        what = f"expected the numbers of {len(positions)} drafts, got {len(numbers)}"
        raise _no_result(path, what)
    return numbers


def _no_result(path: Path, what: str) -> ShardError:
    return ShardError(path, what, fix=f"rm -r {path.parent}, and run the shard again")
