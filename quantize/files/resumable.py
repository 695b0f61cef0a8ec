"""A folder beside an output that keeps what long work has done, for the run that goes on with it.

It holds one JSON file that says what is being done; another command is refused.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
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
        unfinished = folder / f"{path.name}.{os.getpid()}"
        write_text(unfinished, json.dumps(plan, indent=1) + "\n")
        unfinished.rename(path)
    descriptor = open_regular(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise OutputError(
                folder,
                f"another process is {work} there",
                fix="wait until it is done, or give another --out",
            ) from exc
        _check_plan(path, work, plan)
        yield
    finally:
        os.close(descriptor)


def _check_plan(path: Path, work: str, plan: Mapping[str, Any]) -> None:
    try:
        begun = parse_object(read_text(path))
    except (OSError, JsonProblem) as exc:
        raise OutputError(path, f"is no {work} that was begun: {exc}",
                          fix=f"rm -r {path.parent}") from exc  # fmt: skip
    differences = [
        f"  {key}: begun with {short(begun.get(key))}, now {short(plan.get(key))}"
        for key in sorted(begun.keys() | plan.keys())
        if begun.get(key) != plan.get(key)
    ]
    if differences:
        raise OutputError(
            path.parent,
            f"holds another {work} that was begun, of which something is kept",
            details=differences,
            fix=f"give the same arguments again, another --out, or rm -r {path.parent}",
        )
