"""The journal of an acceptance: of which inputs each of its outputs was made, and what it was.

An entry is written before its step begins, and the step's output appears whole or not at all. So
whatever moment a run is killed at, an output without an entry is somebody else's, and one with an
entry was made of the inputs that stand there. When a step has ended, the hash of its output is
written too, so that an output which was edited since is not believed.

    {"format": "draftquant acceptance journal", "format_version": 2,
     "steps": {"gate.json": {"--policy": "release"}}, "outputs": {"gate.json": "9f2c..."}}

Version 1 had no hashes of outputs; a run that goes on with one adds them as it finds them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...quantize.errors import OutputError
from ...quantize.files.resumable import differences, resumable_folder, write_whole
from ...quantize.files.staging import check_output
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object

Inputs = Mapping[str, object]
"""What a step depends on, as the user gives it -> its hash, or the setting itself."""
_WORK = "accepting"
_BEGUN = {"format": "draftquant acceptance", "format_version": 1}
_FILE = "journal.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    format: Literal["draftquant acceptance journal"] = "draftquant acceptance journal"
    format_version: Literal[1, 2] = 2
    steps: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


class Journal:
    """What was done in a folder.

    Args:
        folder: of the acceptance; it need not be there.

    Raises:
        OutputError: the folder is somebody else's, or its journal cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / _FILE
        if folder.exists() or folder.is_symlink():
            _check_is_acceptance(folder)
        else:
            check_output(folder)
        self._entries: dict[str, Inputs] = {}
        self._outputs: dict[str, str] = {}
        if self._path.exists():
            read = _read(self._path)
            self._entries, self._outputs = dict(read.steps), dict(read.outputs)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Create the folder, or go on in it; nobody else has it meanwhile.

        Raises:
            OutputError: another process is at it, or it cannot be written.
        """
        with resumable_folder(self.folder, _WORK, _BEGUN):
            yield

    def is_done(self, output: str, inputs: Inputs, hash_of: Callable[[Path], str]) -> bool:
        """Whether an output is there, made of these inputs, and as it was made.

        Args:
            output: its name.
            inputs: what it is to be made of.
            hash_of: identity of what lies at a path.

        Raises:
            OutputError: it is there, and was made of others, by somebody else, or edited since.
        """
        path = self.folder / output
        if not (path.exists() or path.is_symlink()):
            return False
        begun = self._entries.get(output)
        if begun is None:
            raise OutputError(
                path,
                f"is not of this acceptance: {_FILE} does not name it",
                fix="move it away, or give another --out",
            )
        if differing := differences(begun, as_json(inputs)):
            raise OutputError(
                path,
                "was made of other inputs, and is not mixed with these:",
                details=differing,
                fix=f"give the same again, or another --out; rm -r {path} makes it again",
            )
        made = self._outputs.get(output)
        if made is not None and made != (found := hash_of(path)):
            raise OutputError(
                path,
                f"was changed after it was made: expected sha256 {made[:12]}, got {found[:12]}",
                fix=f"put back what was made, or rm -r {path}, which makes it again",
            )
        return True

    def is_current(self, output: str, inputs: Inputs, found: str) -> bool:
        """Whether an output that may be replaced at any time was made of these inputs.

        Args:
            output: its name.
            inputs: what it is to be made of.
            found: the hash of what is there.
        """
        same = self._entries.get(output) == as_json(inputs)
        return same and self._outputs.get(output) == found

    def begin(self, output: str, inputs: Inputs) -> None:
        """Say of what an output is going to be made."""
        self._entries = {**self._entries, output: as_json(inputs)}
        self._outputs.pop(output, None)
        self._write()

    def end(self, output: str, sha256: str) -> None:
        """Say what an output is, now that it is made."""
        if self._outputs.get(output) != sha256:
            self._outputs[output] = sha256
            self._write()

    def _write(self) -> None:
        text = json.dumps(
            {
                "format": "draftquant acceptance journal",
                "format_version": 2,
                "steps": self._entries,
                "outputs": self._outputs,
            },
            indent=1,
        )
        write_whole(self._path, text + "\n")


def as_json(inputs: Inputs) -> Inputs:
    """As they are read again."""
    return dict(parse_object(json.dumps(dict(inputs), sort_keys=True)))


def _check_is_acceptance(folder: Path) -> None:
    """What stands there was begun by an acceptance, or is an empty folder.

    A run that was killed at its very beginning leaves a plan under a name of its own.
    """
    is_ours = folder.is_dir() and not folder.is_symlink()
    names = {path.name for path in folder.iterdir()} if is_ours else set()
    plan = f"{_WORK}.json"
    if is_ours and (plan in names or all(name.startswith(f"{plan}.") for name in names)):
        return
    raise OutputError(
        folder,
        "it exists, and is not the folder of an acceptance, which has"
        f" {plan}: nothing of others is touched",
        fix="give another --out, or move this one away",
    )


def _read(path: Path) -> _Entries:
    try:
        found: _Entries = decode(_Entries, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise OutputError(
            path, f"is no journal of an acceptance: {exc}", fix="give another --out"
        ) from exc
    return found
