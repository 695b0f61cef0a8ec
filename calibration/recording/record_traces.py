"""Recording: let a transformers target continue prompts, and keep what its drafts see.

It knows the target; about drafts it knows only which layers they read and how they fuse them.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ...recipes.errors import TraceError
from ...recipes.listener import Progress, unseen
from ..prompts.prompt_file import Prompt
from ..traces.manifest import FeatureSpec, TargetIdentity
from ..traces.prompt_trace import FEATURE_DTYPES, PromptTrace
from ..traces.trace_folder import TraceFolder
from ..traces.writer import TraceWriter
from .batch_plan import planned_batch
from .continuing import Continuing, Left, RunningRow
from .decoding import Decoding
from .target_model import ON_CPU, OpenedTarget, Placement, opened_target
from .target_shape import RecordingPlan

_MOST_WAITING = 2  # lots of prompts that wait to be written


@contextmanager
def _written_behind(
    writer: "TraceWriter | HeldTraces", first: int
) -> Iterator[Callable[[Left], None]]:
    """Traces given to the yielded function are written by one thread, in order; exit waits."""
    waiting: deque[Future[None]] = deque()

    def write(left: Left) -> None:
        left.wait()
        for position, trace in left.traces:
            writer.add(trace, position=first + position)

    def submit(left: Left) -> None:
        waiting.append(thread.submit(write, left))
        if len(waiting) > _MOST_WAITING:
            waiting.popleft().result()

    thread = ThreadPoolExecutor(max_workers=1)
    try:
        yield submit
        while waiting:
            waiting.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """Prompts that run together, and with no others."""

    first: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A fixed batch that was recorded; traces with their positions among all prompts."""

    identity: TargetIdentity
    features: FeatureSpec
    traces: tuple[tuple[int, PromptTrace], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTraces:
    """Takes traces like a `TraceWriter`, and holds them."""

    staging: Path
    traces: list[tuple[int, PromptTrace]] = field(default_factory=list)

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Hold one trace."""
        names = [each.name for each in dataclasses.fields(trace)]
        given = {name: getattr(trace, name) for name in names}
        # Tensors of prompts that ended together share memory; each would be sent with all of it.
        cloned: dict[str, Any] = {n: x.clone() for n, x in given.items() if isinstance(x, Tensor)}
        self.traces.append((position, dataclasses.replace(trace, **cloned)))


def write_recorded(
    writer: TraceWriter, batches: Iterable[RecordedBatch], num_prompts: int, on_progress: Progress
) -> None:
    """Write batches in their order."""
    expected: RecordedBatch | None = None
    done = 0
    for batch in batches:
        expected = expected or batch
        if (batch.identity, batch.features) != (expected.identity, expected.features):
            got, wanted = batch.identity, expected.identity
            raise TraceError(
                f"target {got.name}",
                f"not all prompts were recorded of the same target: weights {got.weights_sha256},"
                f" expected {wanted.weights_sha256}",
                fix="let the target's path name the same files wherever it is recorded",
            )
        for position, trace in batch.traces:
            writer.add(trace, position=position)
        done += len(batch.traces)
        on_progress(done, num_prompts)


def record_traces(
    plan: RecordingPlan,
    out: Path,
    *,
    fixed_batches: bool = False,
    placement: Placement = ON_CPU,
    elsewhere: Callable[[Sequence[FixedBatch]], Iterator[RecordedBatch]] | None = None,
    on_progress: Progress = unseen,
    on_note: Callable[[str], None] = lambda _note: None,
) -> TraceFolder:
    """Continue every prompt and write the trace folder `out`; two equal runs write the same bytes.

    Fewer than `batch_size` prompts run together where memory does not hold them. `elsewhere`
    records fixed batches, and returns them in their order.
    """
    plan.check(out)
    prompts = plan.prompts
    # Prompts that replace others change the order in which products are summed. In fixed
    # batches the bits of a prompt depend only on its batch: any part of the batches gives
    # the traces of all of them.
    together = plan.batch_size if fixed_batches else len(prompts)
    starts = range(0, len(prompts), together)
    batches = [FixedBatch(first=i, prompts=prompts[i : i + together]) for i in starts]
    if elsewhere is not None:
        recorded = elsewhere(batches)
        first = next(recorded)
        with plan.output(out, first.identity, first.features) as writer:
            write_recorded(writer, itertools.chain([first], recorded), len(prompts), on_progress)
        return TraceFolder.open(out)
    with (
        opened_target(plan, placement, beside=out.parent) as opened,
        plan.output(out, opened.identity, opened.features) as writer,
    ):
        for batch in batches:
            record_into(
                writer,
                opened,
                batch,
                [plan.max_new_tokens] * len(batch.prompts),
                plan.decoding,
                batch_size=plan.batch_size,
                all_together=fixed_batches,
                on_progress=_progress_of(batch, len(prompts), on_progress),
                on_note=on_note,
            )
    return TraceFolder.open(out)


def record_batch(
    opened: OpenedTarget, plan: RecordingPlan, spool: Path, batch: FixedBatch
) -> RecordedBatch:
    """Record one fixed batch into memory."""
    held = HeldTraces(staging=spool)
    limits = [plan.max_new_tokens] * len(batch.prompts)
    record_into(
        held, opened, batch, limits, plan.decoding, batch_size=plan.batch_size, all_together=True
    )
    return RecordedBatch(
        identity=opened.identity, features=opened.features, traces=tuple(held.traces)
    )


def _progress_of(batch: FixedBatch, num_prompts: int, on_progress: Progress) -> Progress:
    count = len(batch.prompts)

    def show(done: int, total: int) -> None:
        on_progress(batch.first * total + done * count, num_prompts * total)

    return on_progress if count == num_prompts else show


def record_into(
    writer: TraceWriter | HeldTraces,
    opened: OpenedTarget,
    batch: FixedBatch,
    limits: Sequence[int],
    decoding: Decoding,
    *,
    batch_size: int,
    all_together: bool,
    on_progress: Progress = unseen,
    on_note: Callable[[str], None] = lambda _note: None,
) -> None:
    """Continue a batch, each prompt to its limit, and write what is recorded meanwhile."""
    target, prompts = opened.recorded, batch.prompts
    plan = planned_batch(target, prompts, limits, batch_size, decoding, on_note)
    if all_together and plan.batch_size < (asked := min(batch_size, len(prompts))):
        raise TraceError(
            "--fixed-batches",
            f"{plan.batch_size} prompts fit into the memory of {target.device} together, and the"
            f" batch has {asked}",
            fix=f"give --batch-size {plan.batch_size}, for all parts of the prompts",
        )
    work = _Work(prompts, limits, on_progress)
    running = Continuing(
        target,
        prompts,
        limits,
        decoding,
        together=plan.together,
        batch_size=plan.batch_size,
        fuse=opened.fuse,
        stored=FEATURE_DTYPES[opened.features.dtype][0],
        spool=writer.staging,
    )
    with _written_behind(writer, batch.first) as write:
        for left in running.run(work.ran):
            write(left)
            work.left(left.traces)
    work.end()


class _Work:
    """How much a recording has computed of what it will compute at most, in tokens.

    A new token counts as `_NEW`: a run of the target on few tokens reads all the weights, and as
    many prompts as usually run together share that.
    """

    _NEW = 2

    def __init__(
        self, prompts: Sequence[Prompt], limits: Sequence[int], on_progress: Progress
    ) -> None:
        self._whole = [
            len(prompt.token_ids) + limit * self._NEW
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        self._left, self._told, self._total = 0, 0, sum(self._whole)
        self._on_progress = on_progress

    def ran(self, rows: Sequence[RunningRow]) -> None:
        going = (
            self._whole[row.position] if row.ended else row.length + row.num_new * self._NEW
            for row in rows
            if row.length
        )
        self._tell(min(self._total - 1, self._left + sum(going)))

    def left(self, traces: Iterable[tuple[int, PromptTrace]]) -> None:
        self._left += sum(self._whole[position] for position, _ in traces)

    def end(self) -> None:
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        if done > self._told:
            self._told = done
            self._on_progress(done, self._total)
