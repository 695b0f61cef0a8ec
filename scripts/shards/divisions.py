"""The three divisions of a run: its plan, the computing of shards, and the joining of results."""

import functools
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import override

from ...quantize.errors import OutputError
from ...recipes.decode import encode
from ..api.division import Division, Measuring, Recording
from .part_files import arithmetic_of, read_numbers, read_proposals, write_numbers, write_proposals
from .parts import Divisible, Part
from .shard_folder import ShardFolder, Wave

if TYPE_CHECKING:
    from ...calibration.passes.predictions import Proposals
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.replay_cache import Question
    from ...validate.tuning.measured_mixtures import Numbers

_TRACES = "traces"
AnswerT = TypeVar("AnswerT")


class DividedError(Exception):
    """Ends a run of a verb whose purpose is fulfilled: it is planned, or its shards are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[AnswerT]):
    """What a verb asks for at a time.

    Attributes:
        divisible: everything that is divided: each draft by itself, a recording, or measurements.
        arithmetic: of this machine.
        compute: computes a part of the i-th of them into a folder.
        join: makes the answer of the results of a wave.
        last: the verb asks for nothing more.
    """

    divisible: Sequence[Divisible]
    arithmetic: Mapping[str, str]
    compute: Callable[[int, Part, Path], None]
    join: Callable[[Wave], AnswerT]
    last: bool


class _Dividing(Division):
    """What a verb asks for, in the one form in which it is divided."""

    _folder: ShardFolder

    @abstractmethod
    def _answer(self, asked: Asked[AnswerT]) -> AnswerT:
        """The answer, or the end of the run."""

    @override
    def proposals(
        self, asked: "Sequence[Question]", *, last: bool = True
    ) -> "Sequence[Sequence[Proposals]]":
        def compute(i: int, part: Part, staging: Path) -> None:
            write_proposals(
                staging, [one for batch in part.batches for one in asked[i].answer(batch)]
            )

        def join(wave: Wave) -> "list[list[Proposals]]":
            reads = [functools.partial(read_proposals, asked=question) for question in asked]
            return [self._in_order(own, read) for own, read in zip(wave.parts, reads, strict=True)]

        divisible = [divisible_replay(question) for question in asked]
        arithmetic = arithmetic_of(asked[0].draft.device)
        return self._answer(
            Asked(divisible=divisible, arithmetic=arithmetic, compute=compute, join=join, last=last)
        )

    @override
    def numbers(self, asked: Measuring) -> "Sequence[Numbers]":
        def compute(_i: int, part: Part, staging: Path) -> None:
            write_numbers(staging, asked.tasks.compute(part.positions))

        def join(wave: Wave) -> "list[Numbers]":
            (own,) = wave.parts
            return self._in_order(own, read_numbers)

        if not asked.tasks.identities:
            return []
        identities = {f"draft {i + 1}": one for i, one in enumerate(asked.tasks.identities)}
        divisible = Divisible(
            inputs={**asked.inputs, **identities},
            batches=[(position,) for position in range(len(identities))],
            in_order=False,
        )
        return self._answer(
            Asked(
                divisible=[divisible],
                arithmetic=arithmetic_of(asked.device),
                compute=compute,
                join=join,
                last=False,
            )
        )

    @override
    def traces(self, asked: Recording) -> "TraceFolder":
        def compute(_i: int, part: Part, staging: Path) -> None:
            asked.record([asked.prompts[at] for at in part.positions], staging / _TRACES)

        def join(wave: Wave) -> "TraceFolder":
            from ...calibration.traces.trace_folder import TraceFolder

            (own,) = wave.parts
            parts = sorted(own, key=lambda part: part.batches)
            return asked.join([TraceFolder.open(self._folder.result(p) / _TRACES) for p in parts])

        return self._answer(
            Asked(
                divisible=[divisible_recording(asked)],
                arithmetic=arithmetic_of(asked.device),
                compute=compute,
                join=join,
                last=True,
            )
        )

    def _in_order(
        self, own: Sequence[Part], read: "Callable[[Path, Sequence[int]], Sequence[Any]]"
    ) -> list[Any]:
        """What the results of parts hold, in the order of the positions."""
        found: dict[int, Any] = {}
        for part in own:
            read_of = read(self._folder.result(part), part.positions)
            found |= dict(zip(part.positions, read_of, strict=True))
        return [found[position] for position in sorted(found)]


class Planning(_Dividing):
    """Lets a verb come as far as its prompts, and keeps what could be divided there."""

    def __init__(self) -> None:
        self.found: Asked[Any] | None = None

    @override
    def _answer(self, asked: Asked[AnswerT]) -> AnswerT:
        self.found = asked
        raise DividedError

    @override
    def end(self) -> None:
        """It asked for something before."""


class _Planned(_Dividing):
    """Comes as far as a plan reaches, and plans what is asked for next.

    Args:
        folder: of the plan.
        run: which of its commands.
    """

    def __init__(self, folder: ShardFolder, run: int) -> None:
        self._folder, self._run, self._next = folder, run, 0

    def _wave(self, asked: Asked[Any]) -> Wave:
        """The parts of what is asked for, which are those of this run."""
        number, self._next = self._next, self._next + 1
        known = self._folder.waves(self._run)
        if number < len(known):
            wave = known[number]
        else:
            wave = self._folder.plan_wave(self._run, number, asked.divisible, last=asked.last)
        check_wave(asked.divisible, wave, self._folder.folder)
        return wave

    @override
    def end(self) -> None:
        """A last wave without parts says that the search has ended: no run goes on with it."""
        known = self._folder.waves(self._run)
        wave = known[self._next] if self._next < len(known) else None
        if wave is None:
            self._folder.plan_wave(self._run, self._next, (), last=True)
        else:
            check_wave((), wave, self._folder.folder)


class Working(_Planned):
    """Computes some shards, and publishes their results.

    Args:
        folder: of the plan.
        run: which of its commands.
        is_own: whether to compute a part of this shard, unless it has a result.
        on_done: is told of each part that is done: its shard, and whether somebody else was faster.
    """

    def __init__(
        self,
        folder: ShardFolder,
        run: int,
        is_own: Callable[[int, Part], bool],
        on_done: Callable[[int, Part, bool], None],
    ) -> None:
        super().__init__(folder, run)
        self._is_own, self._on_done = is_own, on_done

    @override
    def _answer(self, asked: Asked[AnswerT]) -> AnswerT:
        wave = self._wave(asked)
        for i, own in enumerate(wave.parts):
            for number, part in enumerate(own):
                if self._is_own(number, part) and not self._folder.is_done(part):
                    self._on_done(number, part, self._publish(asked, i, part))
        every = (part for own in wave.parts for part in own)
        if asked.last or not all(map(self._folder.is_done, every)):
            raise DividedError
        return asked.join(wave)

    def _publish(self, asked: Asked[Any], i: int, part: Part) -> bool:
        """Compute a part; whether somebody else was faster."""
        try:
            with self._folder.publishing(part, asked.arithmetic) as staging:
                asked.compute(i, part, staging)
        except OutputError:
            if not self._folder.is_done(part):
                raise
            return True
        return False

    @override
    def end(self) -> None:
        """All is computed; the result is for `Merging` to write."""
        super().end()
        raise DividedError


class Merging(_Planned):
    """Answers with the results of all shards, and computes nothing."""

    @override
    def _answer(self, asked: Asked[AnswerT]) -> AnswerT:
        wave = self._wave(asked)
        self._folder.check_whole(self._run)
        return asked.join(wave)


def check_wave(divisible: Sequence[Divisible], wave: Wave, where: Path) -> None:
    """Refuse parts of other work than what a verb asks for.

    Raises:
        ShardError: see `Divisible.check`.
    """
    for i in range(max(len(divisible), len(wave.parts))):
        none = Divisible(inputs={}, batches=[], in_order=False)
        one = divisible[i] if i < len(divisible) else none
        one.check(wave.parts[i] if i < len(wave.parts) else (), where)


def divisible_replay(asked: "Question") -> Divisible:
    """By batches that go through the draft together: their size rounds logits."""
    inputs = {name: json.dumps(found) for name, found in asked.content.items()}
    return Divisible(inputs=inputs, batches=asked.batches, in_order=False)


def divisible_recording(asked: Recording) -> Divisible:
    """By fixed batches."""
    from ...calibration.recording.record_traces import fixed_batches_of

    said = json.dumps([encode(prompt) for prompt in asked.prompts], sort_keys=True)
    return Divisible(
        inputs={**asked.inputs, "prompts": hashlib.sha256(said.encode()).hexdigest()},
        batches=list(map(tuple, fixed_batches_of(len(asked.prompts), asked.batch_size))),
        in_order=True,
    )
