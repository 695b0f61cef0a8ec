"""A folder of shards: the plan, each part under its address, and the results that were published.

    plan.json                 the commands that are divided, and the number of shards
    waves/RUN-WAVE.json       addresses of the parts of what a command asks for at a time
    parts/ADDRESS.json        a part, whose SHA-256 is the address
    results/ADDRESS/          its result; appears whole, whoever computed it
        result.json           the arithmetic that computed it, and the hashes of its files

Shard i has the i-th part of everything that is divided. A search is planned wave by wave, as the
results of one wave tell the next.

Whatever stands there was written by other machines, and is checked before it is used. Who may write
into the folder may also forge a result: it is as trustworthy as all who share it.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibration.traces.trace_folder import file_sha256
from ...quantize.errors import OutputError
from ...quantize.files.checkpoint import UNVERIFIED
from ...quantize.files.staging import staged_file, staged_output, sync, write_text
from ...recipes.decode import encode
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from .parts import DIVISIBLE, Divisible, Part, ShardError

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"
PARTS, WAVES, RESULTS = "parts", "waves", "results"
_AGAIN = "plan again into a new folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """What a command asks for at a time.

    Attributes:
        parts: of everything that is divided, its parts by shard.
        last: the command asks for nothing more.
    """

    parts: tuple[tuple[Part, ...], ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAsked:
    """A command line and what it asks for first: see `Wave`."""

    command: tuple[str, ...]
    divisible: Sequence[Divisible]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    shards: int
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaveFile:
    parts: tuple[tuple[str, ...], ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What is known of a result.

    Attributes:
        arithmetic: what rounds otherwise on another machine, see `replay_cache.arithmetic`.
        files: name in the result's folder -> SHA-256.
    """

    arithmetic: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFolder:
    """An opened folder.

    Attributes:
        num_shards: at least one.
        commands: words of each command line that is divided, without the program's name.
    """

    folder: Path
    num_shards: int
    commands: tuple[tuple[str, ...], ...]

    @classmethod
    def create(cls, folder: Path, num_shards: int, asked: Sequence[FirstAsked]) -> "ShardFolder":
        """Write a plan.

        Args:
            folder: to create.
            num_shards: parts of everything that is divided.
            asked: at least one command.

        Raises:
            ShardError: nothing has so many batches, and no search will ask for more.
            OutputError: the folder exists, or cannot be written.
        """
        most = max(len(divisible.batches) for one in asked for divisible in one.divisible)
        if num_shards > most and all(one.last for one in asked):
            raise ShardError(
                "--shards",
                f"expected at most {most}, the number of batches, which are never cut; got"
                f" {num_shards}",
                fix=f"give --shards {most}, or a smaller --batch-size in the command",
            )
        plan = _Plan(shards=num_shards, commands=tuple(one.command for one in asked))
        with staged_output(folder, last=PLAN_FILE) as staging:
            (staging / RESULTS).mkdir()
            for run, one in enumerate(asked):
                for path, text in _texts(run, 0, one.divisible, num_shards, one.last).items():
                    write_text(staging / path, text)
            write_text(staging / f"{PLAN_FILE}{UNVERIFIED}", _json(plan))
        return ShardFolder.open(folder)

    @classmethod
    def open(cls, folder: Path) -> "ShardFolder":
        """Read a plan.

        Raises:
            ShardError: there is none, or a part is not the one that its address names.
        """
        plan: _Plan = _read(_Plan, folder / PLAN_FILE, _AGAIN)
        verbs = [" ".join(command[:1]) for command in plan.commands]
        if plan.shards < 1 or not verbs or not set(verbs) <= set(DIVISIBLE):
            what = f"expected shards, and commands of {', '.join(DIVISIBLE)}; got"
            what += f" {plan.shards} shards, and commands of {', '.join(verbs) or 'nothing'}"
            raise ShardError(folder / PLAN_FILE, what, fix=_AGAIN)
        opened = cls(folder=folder, num_shards=plan.shards, commands=plan.commands)
        for run in opened.runs:
            if not opened.waves(run):
                raise ShardError(folder / _wave_file(run, 0), "is missing", fix=_AGAIN)
        return opened

    @property
    def runs(self) -> range:
        """Positions of the commands."""
        return range(len(self.commands))

    def waves(self, run: int) -> tuple[Wave, ...]:
        """What was planned of a command, as far as it is known by now.

        Raises:
            ShardError: a wave or a part cannot be read, or is none of this plan.
        """
        found: list[Wave] = []
        while (path := self.folder / _wave_file(run, len(found))).exists():
            wave: _WaveFile = _read(_WaveFile, path, _AGAIN)
            if not all(0 < len(own) <= self.num_shards for own in wave.parts):
                what = f"expected 1 to {self.num_shards} parts of everything that is divided"
                raise ShardError(path, what, fix=_AGAIN)
            parts = tuple(tuple(map(self._part, own)) for own in wave.parts)
            found.append(Wave(parts=parts, last=wave.last))
        return tuple(found)

    def plan_wave(self, run: int, number: int, asked: Sequence[Divisible], *, last: bool) -> Wave:
        """Plan what a command asks for next; whoever else plans it plans the same.

        Raises:
            OutputError: it cannot be written.
        """
        for name, text in _texts(run, number, asked, self.num_shards, last).items():
            path = self.folder / name
            try:
                with staged_file(path) as staging:
                    write_text(staging, text)
            except OutputError:
                if not path.exists():
                    raise
        return self.waves(run)[number]

    def waiting(self, numbers: Collection[int], run: int) -> list[tuple[int, Part]]:
        """Shard and part of what has no result yet, of these shards and one command."""
        planned = self._planned([run]).values()
        return [(i, part) for i, part in planned if i in numbers and not self.is_done(part)]

    def _planned(self, runs: Iterable[int]) -> dict[str, tuple[int, Part]]:
        """Address -> shard and part, of these commands."""
        waves = (wave for run in runs for wave in self.waves(run))
        return {
            part.address: (number, part)
            for wave in waves
            for own in wave.parts
            for number, part in enumerate(own)
        }

    def result(self, part: Part) -> Path:
        """Where the result of a part is, or will be."""
        return self.folder / RESULTS / part.address

    def is_done(self, part: Part) -> bool:
        """Whether its result was published."""
        return (self.result(part) / RESULT_FILE).is_file()

    @contextmanager
    def publishing(self, part: Part, arithmetic: Mapping[str, str]) -> Iterator[Path]:
        """Give a folder for the files of a result; leaving the block publishes it.

        Raises:
            OutputError: it was published meanwhile, or cannot be written.
        """
        with staged_output(self.result(part), last=RESULT_FILE) as staging:
            yield staging
            files = sorted(path for path in staging.rglob("*") if path.is_file())
            for path in files:
                sync(path)
            digests = {path.relative_to(staging).as_posix(): file_sha256(path) for path in files}
            result = PartResult(arithmetic=arithmetic, files=digests)
            write_text(staging / f"{RESULT_FILE}{UNVERIFIED}", _json(result))

    def check_present(self, run: int) -> None:
        """Refuse to join what is not whole.

        Raises:
            ShardError: names the shards.
        """
        missing = sorted({i for i, _ in self.waiting(range(self.num_shards), run)})
        if missing:
            named = ", ".join(map(str, missing))
            raise ShardError(
                self.folder,
                f"{len(missing)} of its {self.num_shards} shards have no result yet: {named}",
                fix=f"draftquant shards run {self.folder} --shard {missing[0]} (or --all)",
            )

    def check_whole(self, run: int) -> None:
        """Refuse to join what is not whole, not of one arithmetic, or not of this plan alone.

        Raises:
            ShardError: names the shards.
        """
        self.check_present(run)
        planned = self._planned(self.runs)
        present = (self.folder / RESULTS).iterdir()
        # Hidden is what a run is writing, or left when it was killed.
        foreign = sorted(p.name for p in present if p.name not in planned and p.name[:1] != ".")
        if foreign:
            raise ShardError(
                self.folder / RESULTS,
                f"holds what is no result of this plan: {', '.join(foreign[:3])}",
                fix="move it away",
            )
        expected: Mapping[str, str] | None = None
        for number, part in self._planned([run]).values():
            found = self._checked(number, part).arithmetic
            expected = expected or found
            if found != expected:
                differing = [
                    f"{name}: {found.get(name)}, expected {expected.get(name)}"
                    for name in sorted({*expected, *found})
                    if found.get(name) != expected.get(name)
                ]
                raise ShardError(
                    self.result(part),
                    f"of shard {number}, was computed by another arithmetic than others, so that no"
                    f" one machine would give this result: {'; '.join(differing)}",
                    fix="remove it, and run the shard on a machine like those of the others, with"
                    " the same OMP_NUM_THREADS",
                )

    def _checked(self, number: int, part: Part) -> PartResult:
        """The result of a part, whose files are as they were published."""
        folder = self.result(part)
        again = f"rm -r {folder}, and: draftquant shards run {self.folder} --shard {number}"
        result: PartResult = _read(PartResult, folder / RESULT_FILE, again)
        present = {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
        }
        other = sorted((present - {RESULT_FILE}) ^ set(result.files))
        other += [
            name
            for name, digest in result.files.items()
            if name in present and file_sha256(folder / name) != digest
        ]
        if other:
            what = f"of shard {number}, is not as it was published: {', '.join(other[:3])}"
            raise ShardError(folder, what, fix=again)
        return result

    def _part(self, address: str) -> Part:
        path = self.folder / _part_file(address)
        part: Part = _read(Part, path, _AGAIN)
        if part.address != address:
            what = f"was edited: it is part {part.address[:12]}, expected {address[:12]}"
            raise ShardError(path, what, fix=_AGAIN)
        return part


def _part_file(address: str) -> str:
    return f"{PARTS}/{address}.json"


def _wave_file(run: int, wave: int) -> str:
    return f"{WAVES}/{run}-{wave}.json"


def _texts(
    run: int, number: int, asked: Sequence[Divisible], num_shards: int, last: bool
) -> dict[str, str]:
    """The files of a wave, its own as the last."""
    parts = [divisible.parts(num_shards) for divisible in asked]
    wave = _WaveFile(parts=tuple(tuple(p.address for p in own) for own in parts), last=last)
    texts = {_part_file(part.address): part.text for own in parts for part in own}
    return {**texts, _wave_file(run, number): _json(wave)}


def _read(kind: type, path: Path, fix: str) -> Any:
    try:
        return decode(kind, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise ShardError(path, f"cannot be read: {exc}", fix=fix) from exc


def _json(value: object) -> str:
    return f"{json.dumps(encode(value), indent=1, sort_keys=True)}\n"
