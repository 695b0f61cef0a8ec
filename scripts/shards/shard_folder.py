"""A folder of shards: the plan, each shard under its address, and the results that were published.

    plan.json                 the addresses, in order
    shards/ADDRESS.json       a shard, whose SHA-256 is the address
    results/ADDRESS/          its result; appears whole, whoever computed it
        result.json           the arithmetic that computed it, and the hashes of its files

Whatever stands there was written by other machines, and is checked before it is used. Who may write
into the folder may also forge a result: it is as trustworthy as all who share it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibration.traces.trace_folder import file_sha256
from ...quantize.files.checkpoint import UNVERIFIED
from ...quantize.files.staging import staged_output, sync, write_text
from ...recipes.decode import encode
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from .work_shard import ShardError, WorkShard

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"
_SHARDS, _RESULTS = "shards", "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
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
        shards: in the order of the plan, at least one, all of one command.
    """

    folder: Path
    shards: tuple[WorkShard, ...]

    @classmethod
    def create(cls, folder: Path, shards: Sequence[WorkShard]) -> "ShardFolder":
        """Write a plan.

        Raises:
            OutputError: the folder exists, or cannot be written.
        """
        with staged_output(folder, last=PLAN_FILE) as staging:
            for shard in shards:
                write_text(staging / _SHARDS / f"{shard.address}.json", shard.text)
            (staging / _RESULTS).mkdir()
            plan = _Plan(shards=tuple(shard.address for shard in shards))
            write_text(staging / f"{PLAN_FILE}{UNVERIFIED}", _json(plan))
        return ShardFolder.open(folder)

    @classmethod
    def open(cls, folder: Path) -> "ShardFolder":
        """Read a plan.

        Raises:
            ShardError: there is none, or a shard is not the one that its address names.
        """
        plan: _Plan = _read(_Plan, folder / PLAN_FILE, "plan again into a new folder")
        if not plan.shards or len(set(plan.shards)) < len(plan.shards):
            raise ShardError(folder / PLAN_FILE, "expected shards, each once",
                             fix="plan again into a new folder")  # fmt: skip
        shards = tuple(_read_shard(folder / _SHARDS, address) for address in plan.shards)
        if len({shard.command for shard in shards}) > 1:
            raise ShardError(folder / PLAN_FILE, "its shards are of different commands",
                             fix="plan again into a new folder")  # fmt: skip
        return cls(folder=folder, shards=shards)

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command line that is divided."""
        return self.shards[0].command

    def result(self, shard: WorkShard) -> Path:
        """Where the result of a shard is, or will be."""
        return self.folder / _RESULTS / shard.address

    def is_done(self, shard: WorkShard) -> bool:
        """Whether its result was published."""
        return (self.result(shard) / RESULT_FILE).is_file()

    @contextmanager
    def publishing(self, shard: WorkShard, arithmetic: Mapping[str, str]) -> Iterator[Path]:
        """Give a folder for the files of a result; leaving the block publishes it.

        Raises:
            OutputError: it was published meanwhile, or cannot be written.
        """
        with staged_output(self.result(shard), last=RESULT_FILE) as staging:
            yield staging
            files = sorted(path for path in staging.rglob("*") if path.is_file())
            for path in files:
                sync(path)
            digests = {path.relative_to(staging).as_posix(): file_sha256(path) for path in files}
            result = ShardResult(arithmetic=arithmetic, files=digests)
            write_text(staging / f"{RESULT_FILE}{UNVERIFIED}", _json(result))

    def check_whole(self) -> None:
        """Refuse to join what is not whole, not of one arithmetic, or not of this plan alone.

        Raises:
            ShardError: names the shards.
        """
        missing = [i for i, shard in enumerate(self.shards) if not self.is_done(shard)]
        if missing:
            named = ", ".join(map(str, missing))
            raise ShardError(
                self.folder,
                f"{len(missing)} of its {len(self.shards)} shards have no result yet: {named}",
                fix=f"draftquant shards run {self.folder} --shard {missing[0]} (or --all)",
            )
        own = {shard.address for shard in self.shards}
        present = (self.folder / _RESULTS).iterdir()
        # Hidden is what a run is writing, or left when it was killed.
        foreign = sorted(p.name for p in present if p.name not in own and p.name[:1] != ".")
        if foreign:
            raise ShardError(
                self.folder / _RESULTS,
                f"holds what is no result of this plan: {', '.join(foreign[:3])}",
                fix="move it away",
            )
        first = self._checked(0).arithmetic
        for i in range(1, len(self.shards)):
            if (own_arithmetic := self._checked(i).arithmetic) != first:
                differing = [
                    f"{name}: {own_arithmetic.get(name)}, expected {first.get(name)}"
                    for name in sorted({*first, *own_arithmetic})
                    if own_arithmetic.get(name) != first.get(name)
                ]
                raise ShardError(
                    self.result(self.shards[i]),
                    f"shard {i} was computed by another arithmetic than shard 0, so that no one"
                    f" machine would give this result: {'; '.join(differing)}",
                    fix="remove it, and run the shard on a machine like that of shard 0, with the"
                    " same OMP_NUM_THREADS",
                )

    def _checked(self, i: int) -> ShardResult:
        """The result of a shard, whose files are as they were published."""
        folder = self.result(self.shards[i])
        again = f"rm -r {folder}, and: draftquant shards run {self.folder} --shard {i}"
        result: ShardResult = _read(ShardResult, folder / RESULT_FILE, again)
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
            raise ShardError(folder, f"shard {i}: not as it was published: {', '.join(other[:3])}",
                             fix=again)  # fmt: skip
        return result


def _read_shard(folder: Path, address: str) -> WorkShard:
    path = folder / f"{address}.json"
    shard: WorkShard = _read(WorkShard, path, "plan again into a new folder")
    if shard.address != address:
        raise ShardError(
            path,
            f"was edited: it is shard {shard.address[:12]}, expected {address[:12]}",
            fix="plan again into a new folder",
        )
    return shard


def _read(kind: type, path: Path, fix: str) -> Any:
    try:
        return decode(kind, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise ShardError(path, f"cannot be read: {exc}", fix=fix) from exc


def _json(value: object) -> str:
    return f"{json.dumps(encode(value), indent=1, sort_keys=True)}\n"
