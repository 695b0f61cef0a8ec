"""Recording: let a transformers target continue prompts, and keep what its drafts see.

It knows the target; of drafts it knows only which layers they read and how they fuse them.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...quantize.files.staging import check_output
from ...quantize.stored.loading import LoadedDraft
from ...recipes.decode import AT_LEAST_1
from ...recipes.errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.manifest import (
    DatasetSource,
    FeatureDtype,
    FeatureSpec,
    FeatureStorage,
    TargetIdentity,
    TooLongPrompts,
)
from ..traces.prompt_trace import FEATURE_DTYPES, PromptTrace
from ..traces.stored_features import check_storage
from ..traces.target_tables import TargetTables
from ..traces.trace_folder import TraceFolder
from ..traces.writer import TraceWriter, trace_output
from .batch_plan import BatchPlan, planned_batch
from .continuing import Continuing, Left, RunningRow
from .decoding import GREEDY, Decoding
from .recorded_rows import Fuse
from .target_model import (
    ON_CPU,
    OpenedTarget,
    Placement,
    RecordedTarget,
    configured_shape,
    opened_target,
)
from .target_shape import check_prompts

# ---- Writing traces while the target goes on

_MOST_WAITING = 2


class TakesTraces(Protocol):
    """A `TraceWriter`, or what takes traces as it does."""

    @property
    def staging(self) -> Path:
        """A folder for files without a name."""

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Take one trace; `position` is the place of its prompt."""


class BackgroundWriter:
    """One thread that writes what has left, in order; leaving the block waits for it.

    Args:
        writer: that no one else uses meanwhile.
        first: position in the folder of the first prompt that may leave.
    """

    def __init__(self, writer: TakesTraces, first: int = 0) -> None:
        self._writer = writer
        self._first = first
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._thread.shutdown, cancel_futures=kind is not None)
            while self._waiting and kind is None:
                self._waiting.popleft().result()

    def write(self, left: Left) -> None:
        """Have it written soon.

        Raises:
            TraceError, OutputError: what was left before could not be written.
        """
        self._waiting.append(self._thread.submit(self._write, left))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft().result()

    def _write(self, left: Left) -> None:
        left.wait()
        for position, trace in left.traces:
            self._writer.add(trace, position=self._first + position)


# ---- Fixed batches that were recorded elsewhere, and written as one run would have written them


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """Prompts that run together, and with no others.

    Attributes:
        first: position of the first one among all prompts.
    """

    first: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A fixed batch that was recorded.

    Attributes:
        identity: of the target that it was recorded of.
        features: what was recorded of the target's hidden states.
        traces: with their positions among all prompts, in the order in which they ended.
    """

    identity: TargetIdentity
    features: FeatureSpec
    traces: tuple[tuple[int, PromptTrace], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTraces:
    """Takes traces as a `TraceWriter` does, and holds them.

    Attributes:
        staging: a folder for files without a name.
        traces: with their positions.
    """

    staging: Path
    traces: list[tuple[int, PromptTrace]] = field(default_factory=list)

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Hold one."""
        names = [each.name for each in dataclasses.fields(trace)]
        given = {name: getattr(trace, name) for name in names}
        # Tensors of prompts that ended together share memory, all of which each would travel with.
        own: dict[str, Any] = {n: x.clone() for n, x in given.items() if isinstance(x, Tensor)}
        self.traces.append((position, dataclasses.replace(trace, **own)))


def write_recorded(
    writer: TraceWriter,
    batches: Iterable[RecordedBatch],
    num_prompts: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Write batches in their order.

    Args:
        on_progress: called with (prompts that are written, prompts).

    Raises:
        TraceError: not all of them are of the same target, or one contradicts itself.
    """
    expected: RecordedBatch | None = None
    done = 0
    for batch in batches:
        expected = expected or batch
        if (batch.identity, batch.features) != (expected.identity, expected.features):
            raise TraceError(
                f"target {batch.identity.name}",
                "not all prompts were recorded of the same target: weights"
                f" {batch.identity.weights_sha256}, expected {expected.identity.weights_sha256}",
                fix="let the target's path name the same files wherever it is recorded",
            )
        for position, trace in batch.traces:
            writer.add(trace, position=position)
        done += len(batch.traces)
        on_progress(done, num_prompts)


def record_traces(
    target: Path,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    decoding: Decoding = GREEDY,
    aux_layer_ids: Sequence[int] | None = None,
    fuse_with: LoadedDraft | None = None,
    dtype: FeatureDtype = "float32",
    stored: FeatureDtype | None = None,
    batch_size: int = 32,
    fixed_batches: bool = False,
    placement: Placement = ON_CPU,
    table_ids: Collection[int] | None = None,
    storage: FeatureStorage | None = None,
    too_long: TooLongPrompts | None = None,
    dataset: DatasetSource | None = None,
    elsewhere: Callable[[Sequence[FixedBatch]], Iterator[RecordedBatch]] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_note: Callable[[str], None] = lambda _note: None,
) -> TraceFolder:
    """Continue every prompt and write the trace folder `out`.

    Args:
        target: local folder of a causal language model with safetensors weights; no remote code.
        prompts: at least one, run together whatever their lengths where the target allows it.
        max_new_tokens: tokens to add; a prompt ends earlier at the target's end-of-text token,
            unless `decoding` ignores it.
        decoding: how tokens are chosen.
        aux_layer_ids: layers whose outputs are recorded, 0-based, ascending. None = those of
            `fuse_with`, else [1, L/2 - 1, L - 4].
        fuse_with: store this draft's fused features, narrower but of use for drafts with the same
            fc only; it must compute in `dtype`, on any device.
        stored: that features are rounded to at last; None = `dtype`.
        batch_size: prompts run together at most; fewer where memory does not hold them.
        fixed_batches: see `fixed_batches_of`.
        placement: where the target runs.
        table_ids: carry the target's embedding and head, for drafts without their own; with the
            embeddings of the recorded tokens and of these. None = carry no tables.
        storage: of the features, see `FeatureSpec`.
        too_long: prompts that were left out or cut before, for trace.json.
        dataset: that the prompts were taken out of, for trace.json.
        elsewhere: records fixed batches, and gives them in their order; None = they are recorded
            here.
        on_progress: called with (work done, work) whenever the target has run; see `_Work`.

    Returns:
        The written folder, opened. Two runs with the same arguments write the same bytes.

    Raises:
        TraceError: the target cannot be loaded, placed or run, or an argument does not fit it.
        CheckpointError: the target's tables are asked for and not found.
        OutputError: `out` exists already, or its parent does not.
    """
    check_output(out)
    check_storage(storage)
    tables = None if table_ids is None else TargetTables.find(target)
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        AT_LEAST_1.check(TraceError, name, value, fix="give a larger number")
    check_prompts(prompts, configured_shape(target), max_new_tokens)
    batches = fixed_batches_of(len(prompts), batch_size) if fixed_batches else [range(len(prompts))]
    output = partial(
        trace_output,
        out,
        temperature=decoding.temperature,
        sampling=decoding.sampling,
        ignore_eos=decoding.ignore_eos,
        logprobs=decoding.logprob_spec,
        tables=tables,
        table_ids=table_ids or (),
        too_long=too_long,
        datasets=(dataset,) if dataset else None,
    )
    if elsewhere is not None:
        some = [FixedBatch(first=b.start, prompts=prompts[b.start : b.stop]) for b in batches]
        found = elsewhere(some)
        first = next(found)
        with output(first.identity, first.features) as writer:
            write_recorded(writer, itertools.chain([first], found), len(prompts), on_progress)
        return TraceFolder.open(out)
    with (
        opened_target(
            target,
            aux_layer_ids=aux_layer_ids,
            fuse_with=fuse_with,
            dtype=dtype,
            stored=stored,
            placement=placement,
            storage=storage,
            beside=out.parent,
        ) as opened,
        output(opened.identity, opened.features) as writer,
    ):
        for batch in batches:
            record_into(
                writer,
                opened.recorded,
                prompts[batch.start : batch.stop],
                [max_new_tokens] * len(batch),
                decoding,
                batch_size=batch_size,
                first=batch.start,
                all_together=fixed_batches,
                fuse=opened.fuse,
                stored=opened.features.dtype,
                on_progress=_progress_of(batch, len(prompts), on_progress),
                on_note=on_note,
            )
    return TraceFolder.open(out)


def fixed_batches_of(num_prompts: int, batch_size: int) -> list[range]:
    """Positions of prompts that run together, and with no others, whoever else is recorded.

    Prompts that take the place of others change the order in which products are summed. In fixed
    batches the bits of a prompt are a function of its batch alone: any part of the batches gives
    the traces of all of them.
    """
    return [
        range(first, min(first + batch_size, num_prompts))
        for first in range(0, num_prompts, batch_size)
    ]


def record_batch(
    opened: OpenedTarget,
    batch: FixedBatch,
    *,
    max_new_tokens: int,
    decoding: Decoding,
    batch_size: int,
    spool: Path,
) -> RecordedBatch:
    """Record one fixed batch into memory.

    Args:
        max_new_tokens: as of `record_traces`, also the next two.
        decoding: how tokens are chosen.
        spool: see `KeptRows`.
    """
    held = HeldTraces(staging=spool)
    record_into(
        held,
        opened.recorded,
        batch.prompts,
        [max_new_tokens] * len(batch.prompts),
        decoding,
        batch_size=batch_size,
        first=batch.first,
        all_together=True,
        fuse=opened.fuse,
        stored=opened.features.dtype,
    )
    return RecordedBatch(
        identity=opened.identity, features=opened.features, traces=tuple(held.traces)
    )


def _progress_of(
    batch: range, num_prompts: int, on_progress: Callable[[int, int], None]
) -> Callable[[int, int], None]:
    """Progress of all prompts, by that of one batch."""

    def show(done: int, total: int) -> None:
        on_progress(batch.start * total + done * len(batch), num_prompts * total)

    return on_progress if len(batch) == num_prompts else show


def record_into(
    writer: TakesTraces,
    target: RecordedTarget,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    decoding: Decoding,
    *,
    batch_size: int,
    first: int = 0,
    all_together: bool = False,
    fuse: Fuse | None = None,
    stored: FeatureDtype | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_note: Callable[[str], None] = lambda _note: None,
) -> None:
    """Continue every prompt, and write what is recorded while the target goes on.

    Args:
        writer: of the trace folder, or whatever takes them.
        target: loaded, with its hooks.
        prompts: at least one.
        limits: most new tokens of each.
        decoding: how tokens are chosen.
        batch_size: as of `record_traces`, and the last two.
        all_together: fewer rows than prompts or `batch_size` are an error, not a note.
        fuse: made of the features of each prompt; None = they stay as they are.
        stored: dtype of the folder's features; None = the target's.
        on_progress: see `_Work`.
    """
    plan = planned_batch(target, prompts, limits, batch_size, decoding, on_note)
    if all_together and plan.batch_size < min(batch_size, len(prompts)):
        raise TraceError(
            "--fixed-batches",
            f"{plan.batch_size} prompts fit into the memory of {target.device} together, and the"
            f" batch has {min(batch_size, len(prompts))}",
            fix=f"give --batch-size {plan.batch_size}, for all parts of the prompts",
        )
    work = _Work(prompts, limits, plan, on_progress)
    running = Continuing(
        target,
        prompts,
        limits,
        decoding,
        together=plan.together,
        batch_size=plan.batch_size,
        fuse=fuse,
        stored=FEATURE_DTYPES[stored][0] if stored else None,
        spool=writer.staging,
    )
    with BackgroundWriter(writer, first) as behind:
        for left in running.run(work.ran):
            behind.write(left)
            work.left(left.traces)
    work.end()


class _Work:
    """How much a recording has computed of what it will at most, in tokens.

    A run of the target on few tokens takes about as long as one on `_LEAST` more: it reads all the
    weights. Prompts that run together share that. Such runs are also the trial before.
    """

    _LEAST = 32
    _TRIAL = 14 * _LEAST

    def __init__(
        self,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        plan: BatchPlan,
        on_progress: Callable[[int, int], None],
    ) -> None:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self._new = [1 + self._LEAST / together for together in plan.num_together(lengths)]
        self._whole = [
            length + limit * new
            for length, limit, new in zip(lengths, limits, self._new, strict=True)
        ]
        self._left, self._told = float(self._TRIAL), 0
        self._total = self._TRIAL + round(sum(self._whole))
        self._on_progress = on_progress

    def ran(self, rows: Sequence[RunningRow]) -> None:
        """The target ran on these rows."""
        going = (
            self._whole[row.position]
            if row.ended
            else row.length + row.num_new * self._new[row.position]
            for row in rows
        )
        self._tell(min(self._total - 1, int(self._left + sum(going))))

    def left(self, traces: Iterable[tuple[int, PromptTrace]]) -> None:
        """Prompts are continued, whose rows now go to others."""
        self._left += sum(self._whole[position] for position, _ in traces)

    def end(self) -> None:
        """Everything is written."""
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        if done > self._told:
            self._told = done
            self._on_progress(done, self._total)
