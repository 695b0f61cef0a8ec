"""A measurement reconciled with a replay of traces: over all prompts, with the draft at hand."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from typing_extensions import override

from ...calibration.passes.batches import batches_of, work_of
from ...calibration.passes.draft_inputs import check_trace_fits
from ...calibration.passes.predictions import num_draft_tokens_fault
from ...calibration.traces.manifest import TraceEntry
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.target_tables import SharedTables
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.stored.loading import LoadedDraft
from ...recipes.brief import Brief
from ..counting.acceptance_counts import AcceptanceCounts, pooled
from ..errors import MeasureError
from ..measure.measurement import Measurement, RequestRecord, Speculation
from .choice_gap import choice_gap
from .common_rounds import common_length
from .every_position import NEAR, every_position_of_batch, noise
from .reconciled_prompt import ReconciledPrompt, reconcile_prompt
from .reconciling_folder import BothDtypes, ReconcilingFolder


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reconciliation(Brief):
    """What a server accepted, beside what replay says of the same prompts.

    Attributes:
        name: the measurement.
        num_draft_tokens: tokens drafted per verify step (K).
        near: distance of two logits of the draft up to which BF16 may order them either way.
        max_gap: difference of two log-probabilities of the target, in nats, up to which its choice
            is a near tie.
        other_draft: the server had another draft than the replayed one; None = it is not known.
        prompts: the compared prompts, in the order of the measurement.
        num_not_recorded: prompts of the measurement that the traces do not hold.
        num_left_out: prompts that both hold and that the limit leaves out.
    """

    name: str
    num_draft_tokens: int
    near: float
    max_gap: float
    other_draft: bool | None
    prompts: tuple[ReconciledPrompt, ...]
    num_not_recorded: int
    num_left_out: int = 0

    @property
    def exit_code(self) -> int:
        """0 all is explained, 1 something is not, 3 of something that is not known."""
        outcomes = {prompt.outcome for prompt in self.prompts}
        return 1 if "unexplained" in outcomes else 3 if "not known" in outcomes else 0

    @property
    def totals(self) -> dict[str, AcceptanceCounts]:
        """Verify steps of server and replay: all of them, then those in common text.

        Only the latter two can be compared with each other.
        """
        columns = {
            "served": (prompt.served for prompt in self.prompts),
            "replayed": (prompt.replayed for prompt in self.prompts),
            "served, rounds in common text": (prompt.served_there for prompt in self.prompts),
            "replayed, the same rounds": (prompt.replayed_there for prompt in self.prompts),
        }
        return {name: pooled(own, self.num_draft_tokens) for name, own in columns.items()}

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON, with outcomes and `exit_code`."""
        prompts = [
            dataclasses.asdict(prompt)
            | {"outcome": prompt.outcome, "num_compared": prompt.num_compared}
            for prompt in self.prompts
        ]
        return dataclasses.asdict(self) | {"prompts": prompts, "exit_code": self.exit_code}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader has to know of the two sides, a sentence each."""
        found = []
        if self.other_draft:
            found.append("the server had another draft than the one replayed")
        if self.other_draft is None:
            found.append("the measurement does not say which draft was served (measure --draft)")
        if self.num_not_recorded:
            found.append(
                f"{self.num_not_recorded} prompts of the measurement are not in the traces"
            )
        return tuple(found)

    @override
    def brief(self) -> Mapping[str, object]:
        outcomes = [prompt.outcome for prompt in self.prompts]
        counted = {one: outcomes.count(one) for one in dict.fromkeys(outcomes)}
        words = {0: "explained", 1: "WRONG: not explained", 3: "UNKNOWN of some prompts"}
        return {
            "outcome": words[self.exit_code],
            "measurement": self.name,
            "K": self.num_draft_tokens,
            "prompts": ", ".join(f"{number} {one}" for one, number in counted.items()),
        }


def check_reconcilable(measurement: Measurement, traces: TraceFolder) -> Speculation:
    """How the server drafted, if its rounds are those of a replay.

    Raises:
        MeasureError: nothing was drafted, tokens were accepted that the target would not have
            written, or texts were drawn.
    """
    speculation, name = measurement.setup.speculation, measurement.name
    if speculation is None:
        raise MeasureError(name, "was measured without a draft, so it has no verify steps",
                           fix="give a measurement of a server with a draft")  # fmt: skip
    if speculation.lossy:
        raise MeasureError(
            name,
            f"the server accepts tokens that its target would not have written"
            f" ({', '.join(speculation.lossy)}), which no replay does",
            fix="measure again without these settings",
        )
    drawn = [traces.folder] * traces.manifest.sampled + [name] * bool(
        measurement.setup.asked.temperature
    )
    if drawn:
        raise MeasureError(drawn[0], "its texts were drawn, and two draws give two texts",
                           fix="record and measure at temperature 0")  # fmt: skip
    return speculation


def reconcile(
    measurement: Measurement,
    traces: TraceFolder,
    drafts: tuple[LoadedDraft, LoadedDraft],
    *,
    tables: SharedTables,
    max_gap: float,
    other_draft: bool | None = None,
    limit: int | None = None,
    kept: ReconcilingFolder | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Reconciliation:
    """Replay a draft along traces, and hold a measurement of it against that.

    Args:
        measurement: of a server that drafts, see `check_reconcilable`.
        traces: of its target.
        drafts: the draft in bfloat16, as engines compute, and in float32.
        tables: of the target, for how near its ties were.
        max_gap: nats between two tokens of the target up to which either may be chosen.
        other_draft: see `Reconciliation`.
        limit: only so many prompts, the first ones of the measurement; None = all.
        kept: what an earlier run has replayed, and this one goes on to keep; None = nothing is.
        on_progress: called with (work done, work) after each batch of prompts that is not kept.

    Raises:
        MeasureError: as of `check_reconcilable`, no prompt is in both, or K cannot be drafted.
        TraceError: the traces do not fit the draft, or are damaged.
    """
    num_draft_tokens = check_reconcilable(measurement, traces).num_draft_tokens
    for draft in drafts:
        check_trace_fits(draft, traces)
    if fault := num_draft_tokens_fault(drafts[0].geometry, num_draft_tokens):
        raise MeasureError(f"{measurement.name}: K", fault[0], fix=fault[1])
    pairs = _pairs(measurement, traces)
    if not any(record.prompt_sha256 == digest for record, digest, _ in pairs):
        raise MeasureError(
            measurement.name,
            f"has no prompt in common with {traces.folder}",
            fix="measure the prompts that were recorded, with the same chat template",
        )
    chosen = pairs[:limit]
    wanted = {entry.id for _, _, entry in chosen}
    replayed = _replayed(drafts, traces, wanted, num_draft_tokens, kept, on_progress)
    met: list[_Met] = []
    for record, _, entry in chosen:
        trace = traces.load(entry)
        gap = _gap(record, trace, traces, tables)
        text = dataclasses.replace(trace, features=trace.features[:0].clone())  # they are large
        met.append(_Met(record=record, text=text, places=replayed[entry.id], gap=gap))
    near = NEAR * noise([m.places.as_served for m in met], [m.places.exact for m in met])
    prompts = [
        reconcile_prompt(
            one.record,
            one.text,
            one.places.as_served,
            num_draft_tokens,
            near=near,
            gap=one.gap,
            max_gap=max_gap,
            other_draft=bool(other_draft),
        )
        for one in met
    ]
    return Reconciliation(
        name=measurement.name,
        num_draft_tokens=num_draft_tokens,
        near=near,
        max_gap=max_gap,
        other_draft=other_draft,
        prompts=tuple(prompts),
        num_not_recorded=len(measurement.records) - len(pairs),
        num_left_out=len(pairs) - len(chosen),
    )


def _replayed(
    drafts: tuple[LoadedDraft, LoadedDraft],
    traces: TraceFolder,
    wanted: Collection[str],
    num_draft_tokens: int,
    kept: ReconcilingFolder | None,
    on_progress: Callable[[int, int], None],
) -> dict[str, BothDtypes]:
    """By the id of each prompt; in batches, each of which is kept when it is done."""
    prompts = traces.manifest.prompts
    found: dict[str, BothDtypes] = {}
    missing: list[int] = []
    for position, entry in enumerate(prompts):
        both = kept.find(position) if kept and entry.id in wanted else None
        if both is not None:
            found[entry.id] = both
        elif entry.id in wanted:
            missing.append(position)
    alone = not all(draft.rounds_alone for draft in drafts)
    batches = batches_of([prompts[i] for i in missing], max_prompts=1 if alone else None)
    work = [work_of([prompts[missing[i]] for i in batch], num_draft_tokens) for batch in batches]
    for done, batch in zip(accumulate(work), batches, strict=True):
        positions = [missing[i] for i in batch]
        texts = [traces.load(prompts[i]) for i in positions]
        as_served, exact = (
            every_position_of_batch(draft, traces, texts, num_draft_tokens) for draft in drafts
        )
        for position, *own in zip(positions, as_served, exact, strict=True):
            both = BothDtypes(as_served=own[0], exact=own[1])
            found[prompts[position].id] = both
            if kept:
                kept.keep(position, both)
        on_progress(done, sum(work))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """A record and the trace of its prompt, without features; replay by each draft."""

    record: RequestRecord
    text: PromptTrace
    places: BothDtypes
    gap: float | None


def _pairs(
    measurement: Measurement, traces: TraceFolder
) -> list[tuple[RequestRecord, str, TraceEntry]]:
    """Every record with the hash and the trace of its prompt, or else of the one of its name."""
    digests = {entry.id: traces.load(entry).prompt_sha256 for entry in traces.manifest.prompts}
    by_id = {entry.id: entry for entry in traces.manifest.prompts}
    by_prompt = {digests[entry.id]: entry for entry in traces.manifest.prompts}
    found = []
    for record in measurement.records:
        entry = by_id.get(record.id)
        if entry is None or digests[entry.id] != record.prompt_sha256:
            entry = by_prompt.get(record.prompt_sha256, entry)
        if entry is not None:
            found.append((record, digests[entry.id], entry))
    return found


def _gap(
    record: RequestRecord, trace: PromptTrace, traces: TraceFolder, tables: SharedTables
) -> float | None:
    """Of the target's choice where the texts part; None where they do not."""
    continuation: Sequence[int] = trace.continuation
    common = common_length(record.token_ids, continuation)
    if common == min(len(record.token_ids), len(continuation)):
        return None
    return choice_gap(record, trace, common, traces, tables)
