"""`WorkShard`: a part of a run, named by the hash of all that decides about its result."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...recipes.decode import encode
from ...recipes.errors import DraftQuantError


class ShardError(DraftQuantError):
    """A run cannot be divided, or its parts are not what they claim to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShard:
    """One part of a run.

    Attributes:
        draftquant: version of this package.
        code: hash of its modules that compute.
        command: words of the command line whose run is divided, without the program's name.
        inputs: what the run reads -> its identity.
        batches: positions of the prompts of this part, by the batches in which they run together.
    """

    draftquant: str
    code: str
    command: tuple[str, ...]
    inputs: Mapping[str, str]
    batches: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        """As it is stored: JSON with sorted keys."""
        return f"{json.dumps(encode(self), sort_keys=True)}\n"

    @property
    def address(self) -> str:
        """SHA-256 of `text`, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def num_prompts(self) -> int:
        """Of all its batches."""
        return sum(map(len, self.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """A run that can be divided.

    Attributes:
        inputs: as of `WorkShard`.
        batches: of all its prompts. A batch is never cut.
        in_order: each part has batches that follow each other; else every N-th, so that each part
            has long ones and short ones.
    """

    inputs: Mapping[str, str]
    batches: Sequence[Sequence[int]]
    in_order: bool

    def shards(self, count: int, command: Sequence[str]) -> tuple[WorkShard, ...]:
        """So many parts.

        Raises:
            ShardError: there are fewer batches.
        """
        from ...quantize.files.package_version import package_version
        from ...validate.counting.replay_cache import code_sha256

        total = len(self.batches)
        if count > total:
            raise ShardError(
                "--shards",
                f"expected at most {total}, the number of batches, which are never cut; got"
                f" {count}",
                fix=f"give --shards {total}, or a smaller --batch-size in the command",
            )
        return tuple(
            WorkShard(
                draftquant=package_version("draftquant"),
                code=code_sha256(),
                command=tuple(command),
                inputs=self.inputs,
                batches=tuple(map(tuple, self._own(i, count))),
            )
            for i in range(count)
        )

    def check(self, shard: WorkShard, where: object) -> None:
        """Refuse a part of another run than this one.

        Raises:
            ShardError: code, inputs or batches differ from those that were planned.
        """
        from ...validate.counting.replay_cache import code_sha256

        planned = {"the code of draftquant": shard.code, **shard.inputs}
        found = {"the code of draftquant": code_sha256(), **self.inputs}
        other = [n for n in sorted({*planned, *found}) if planned.get(n) != found.get(n)]
        if not other and not set(shard.batches) <= set(map(tuple, self.batches)):
            other = ["the batches of prompts"]
        if other:
            raise ShardError(
                where,
                f"was planned with other inputs than those of this run: {', '.join(other)}",
                fix="run it where the command's paths name what they named when it was planned, or"
                " plan again into a new folder",
            )

    def _own(self, i: int, count: int) -> Sequence[Sequence[int]]:
        if not self.in_order:
            return self.batches[i::count]
        total = len(self.batches)
        return self.batches[i * total // count : (i + 1) * total // count]
