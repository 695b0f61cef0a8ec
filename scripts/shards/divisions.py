"""The three divisions of a run: its plan, the computing of shards, and the joining of results."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.errors import OutputError
from ...recipes.decode import encode
from ..api.division import Division, Recording
from .proposals_file import arithmetic_of, read_proposals, write_proposals
from .shard_folder import ShardFolder
from .work_shard import Divisible, ShardError, WorkShard

if TYPE_CHECKING:
    from ...calibration.passes.predictions import Proposals
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.replay_cache import Question

_TRACES = "traces"


class DividedError(Exception):
    """Ends a run of a verb whose purpose is fulfilled: it is planned, or its shards are done."""


class Planning(Division):
    """Lets a verb come as far as its prompts, and keeps what could be divided there."""

    def __init__(self) -> None:
        self.found: Divisible | None = None

    def proposals(self, asked: "Sequence[Question]") -> "Sequence[Sequence[Proposals]]":
        """See `Division`."""
        self.found = divisible_replay(asked)
        raise DividedError

    def traces(self, asked: Recording) -> "TraceFolder":
        """See `Division`."""
        self.found = divisible_recording(asked)
        raise DividedError


class Working(Division):
    """Computes some shards, and publishes their results.

    Args:
        folder: of the plan.
        shards: to compute; one that has a result meanwhile is left.
        on_done: is told of each shard that is done, and whether somebody else was faster.
    """

    def __init__(
        self,
        folder: ShardFolder,
        shards: Sequence[WorkShard],
        on_done: Callable[[WorkShard, bool], None],
    ) -> None:
        self._folder, self._shards, self._on_done = folder, shards, on_done

    def proposals(self, asked: "Sequence[Question]") -> "Sequence[Sequence[Proposals]]":
        """See `Division`."""
        run, arithmetic = divisible_replay(asked), arithmetic_of(asked[0].draft.device)

        def compute(shard: WorkShard, staging: Path) -> None:
            for i, question in enumerate(asked):
                found = [one for batch in shard.batches for one in question.answer(batch)]
                write_proposals(staging, i, found)

        self._compute_all(run, arithmetic, compute)
        raise DividedError

    def traces(self, asked: Recording) -> "TraceFolder":
        """See `Division`."""

        def compute(shard: WorkShard, staging: Path) -> None:
            own = [asked.prompts[position] for batch in shard.batches for position in batch]
            asked.record(own, staging / _TRACES)

        self._compute_all(divisible_recording(asked), arithmetic_of(asked.device), compute)
        raise DividedError

    def _compute_all(
        self,
        run: Divisible,
        arithmetic: Mapping[str, str],
        compute: Callable[[WorkShard, Path], None],
    ) -> None:
        for shard in self._shards:
            run.check(shard, self._folder.folder)
        for shard in self._shards:
            late = self._folder.is_done(shard)
            if not late:
                try:
                    with self._folder.publishing(shard, arithmetic) as staging:
                        compute(shard, staging)
                except OutputError:
                    if not self._folder.is_done(shard):
                        raise
                    late = True
            self._on_done(shard, late)


class Merging(Division):
    """Answers with the results of all shards, and computes nothing.

    Args:
        folder: of the plan; every shard has a result, see `ShardFolder.check_whole`.
    """

    def __init__(self, folder: ShardFolder) -> None:
        self._folder = folder

    def proposals(self, asked: "Sequence[Question]") -> "Sequence[Sequence[Proposals]]":
        """See `Division`."""
        self._check(divisible_replay(asked))
        return [self._of_draft(i, question) for i, question in enumerate(asked)]

    def _of_draft(self, i: int, asked: "Question") -> "list[Proposals]":
        found: dict[int, Proposals] = {}
        for shard in self._folder.shards:
            positions = [position for batch in shard.batches for position in batch]
            own = read_proposals(self._folder.result(shard), i, asked, positions)
            found |= dict(zip(positions, own, strict=True))
        return [found[position] for position in range(len(asked.traces))]

    def traces(self, asked: Recording) -> "TraceFolder":
        """See `Division`."""
        from ...calibration.traces.trace_folder import TraceFolder

        self._check(divisible_recording(asked))
        shards = sorted(self._folder.shards, key=lambda shard: shard.batches)
        return asked.join([TraceFolder.open(self._folder.result(one) / _TRACES) for one in shards])

    def _check(self, run: Divisible) -> None:
        for shard in self._folder.shards:
            run.check(shard, self._folder.folder)
        held = sorted(batch for shard in self._folder.shards for batch in shard.batches)
        if held != sorted(map(tuple, run.batches)):
            raise ShardError(
                self._folder.folder,
                f"its shards hold {len(held)} batches, expected each of the {len(run.batches)} of"
                " this run once",
                fix="plan again into a new folder",
            )


def divisible_replay(asked: "Sequence[Question]") -> Divisible:
    """By batches that go through the drafts together: their size rounds logits."""
    first = asked[0]
    inputs = {name: json.dumps(found) for name, found in first.content.items() if name != "draft"}
    for i, question in enumerate(asked):
        inputs[f"draft {i + 1}"] = str(question.content["draft"])
    return Divisible(inputs=inputs, batches=first.batches, in_order=False)


def divisible_recording(asked: Recording) -> Divisible:
    """By fixed batches."""
    from ...calibration.recording.record_traces import fixed_batches_of

    said = json.dumps([encode(prompt) for prompt in asked.prompts], sort_keys=True)
    return Divisible(
        inputs={**asked.inputs, "prompts": hashlib.sha256(said.encode()).hexdigest()},
        batches=list(map(tuple, fixed_batches_of(len(asked.prompts), asked.batch_size))),
        in_order=True,
    )
