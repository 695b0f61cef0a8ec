"""What long work has done, kept beside its output for the run that goes on with it.

Mostly a folder with one JSON file that says what is being done; another command is refused.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...recipes.errors import short
from ...recipes.regular_file import open_regular, read_text
from ...recipes.strict_json import JsonProblem, parse_object
from ..errors import OutputError
from .staging import write_text


@contextmanager
def resumable_folder(folder: Path, work: str, plan: Mapping[str, Any]) -> Iterator[None]:
    """Begin work, or go on with the same; nobody else has the folder meanwhile.

    Args:
        folder: beside an output; created where it is not there.
        work: what is done, one word ("recording"): the plan lies in `work`.json.
        plan: what exactly, as JSON says it.

    Raises:
        OutputError: another plan was begun there, another process is at it, or it cannot be
            written.
    """
    path = folder / f"{work}.json"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"{path.name}.{os.getpid()}"  # nobody has the folder yet
        write_text(unfinished, json.dumps(plan, indent=1) + "\n")
        unfinished.rename(path)
    descriptor = open_regular(path)
    try:
        take_alone(path, descriptor, folder, work)
        try:
            begun = parse_object(read_text(path))
        except (OSError, JsonProblem) as exc:
            raise OutputError(path, f"it is not an unfinished {work}: {exc}",
                              fix=f"rm -r {folder}") from exc  # fmt: skip
        refuse_other_work(folder, work, differences(begun, plan), remove=f"rm -r {folder}")
        yield
    finally:
        os.close(descriptor)


def take_alone(path: Path, descriptor: int, where: Path, work: str) -> None:
    """Take a file; it is nobody else's, and not one that a run has just finished and removed.

    Args:
        descriptor: of it, opened; whoever closes it gives the file back.
        work: what is done there, in one word.

    Raises:
        OutputError: another process is at it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        is_there = False
    if not is_there:
        raise OutputError(
            where,
            f"another process is {work} there",
            fix="wait until it is done, or give another --out",
        )


def differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """In what work that was begun is not what is to be done now, a line for each key."""
    return tuple(
        f"  {key}: it was {short(begun.get(key))}, now it is {short(now.get(key))}"
        for key in sorted(begun.keys() | now.keys())
        if begun.get(key) != now.get(key)
    )


def refuse_other_work(
    where: Path, work: str, differing: Sequence[str], *, given: str = "arguments", remove: str
) -> None:
    """Go on with equal work alone.

    Args:
        work: what is done, in one word.
        differing: see `differences`.

    Raises:
        OutputError: something differs.
    """
    if differing:
        raise OutputError(
            where,
            f"it holds an unfinished {work} with other settings, of which results are kept",
            details=tuple(differing),
            fix=f"give the same {given} again, another --out, or {remove}",
        )


def write_whole(path: Path, text: str) -> None:
    """Keep a file; it has its name when it is whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write_text(unfinished, text)
    unfinished.rename(path)
