"""The gate of a fine-tuned draft: two comparisons, and neither is called the other.

Against the identically fine-tuned BF16 draft (control) the change is that of quantization alone.
Against the draft as released it is that of quantization and fine-tuning together, so that a gain
says nothing about quantization; but a loss must not exceed the limit there either. PASS needs both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from ...quantize.files.provenance import TunedProvenance
from ...recipes.brief import percent
from ..counting.draft_counts import distinct_prompts, recorded_pairs
from ..counting.draft_replay import DraftReplay
from ..counting.paired_change import PairedChange
from ..errors import GateError
from .anomalies import Background
from .candidate_origin import DraftFolder
from .categories import change_of
from .contradictions import exit_code_problem
from .interim_analysis import Look
from .judgement import GateReport, judge
from .policy import Policy
from .published import Published
from .verdict import EXIT_CODES, Verdict, worst

MARK = "RETUNED"
RULE = (
    "the candidate passes if it passes against the identically fine-tuned BF16 draft (control),"
    " which shows what quantization alone changed, and against the BF16 draft as released, which"
    " shows what quantization and fine-tuning changed together"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RetunedRecord(Published):
    """Both comparisons, and the verdict that they give together: the keys of a report.

    Attributes:
        verdict: the worse one of the two; ANOMALOUS is the worst.
        reason: of both, with the figures. action: what to do about it, None for PASS.
        quantization_change: relative, against the identically fine-tuned BF16 draft (control).
        training_change: relative, of that BF16 draft against the draft as released.
        quantization_and_training_change: relative, against the draft as released. Each is None
            where the replays cannot be compared.
        against_tuned: the control is the baseline: what quantization changed.
        against_bf16: the draft as released is: what quantization and fine-tuning changed.
    """

    kind: Literal["retuned"] = "retuned"
    mark: str
    rule: str
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    quantization_change: float | None
    training_change: float | None
    quantization_and_training_change: float | None
    against_tuned: GateReport
    against_bf16: GateReport

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of both comparisons, each once."""
        both = (*self.against_tuned.warnings, *self.against_bf16.warnings)
        return tuple(dict.fromkeys(both))

    def problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        return exit_code_problem(self.verdict, self.exit_code)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        keys = [field.name for field in dataclasses.fields(RetunedRecord)]
        mapping = dataclasses.asdict(self)
        return {key: mapping[key] for key in keys}

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verdict": self.verdict,
            "change by quantization": percent(self.quantization_change),
            "change by fine-tuning": percent(self.training_change),
            "change by both": percent(self.quantization_and_training_change),
            "warnings": len(self.warnings) or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RetunedReport(RetunedRecord):
    """The verdict on a draft that was fine-tuned after quantization, in two comparisons.

    Attributes:
        training: what fine-tuning changed without quantization, from the released BF16 draft to the
            control.
    """

    training: PairedChange | None


def check_tuned_baseline(
    baseline: DraftFolder,
    candidate: DraftFolder,
    tuned: DraftFolder | None,
    *,
    unrelated: bool = False,
) -> tuple[str, ...]:
    """A fine-tuned candidate comes with the identically fine-tuned BF16 draft, no other with one.

    Args:
        baseline: the draft as released.
        candidate: the quantized draft.
        tuned: what is given as the control; None = nothing.
        unrelated: see `check_folders`.

    Returns:
        What a reader has to know, in sentences without a full stop.

    Raises:
        GateError: it is missing, of no use, of another draft or of another retuning.
    """
    record = candidate.quantized_by
    retuning = record.retuning if record is not None else None
    if retuning is None or unrelated:
        if tuned is not None:
            why = "two drafts are compared on purpose" if unrelated else "this candidate was not"
            raise GateError(
                "--tuned-baseline",
                f"is only for a candidate that 'draftquant retune' fine-tuned, but {why}",
                fix="leave it out",
            )
        return () if retuning is None else (f"{MARK}: the candidate was fine-tuned as well",)
    if tuned is None:
        raise GateError(
            candidate.folder,
            f"{MARK}: this draft was fine-tuned as well as quantized, so a gain may come from"
            " either; expected the identically fine-tuned BF16 draft (control) too, got none",
            fix="give the folder that 'draftquant retune --baseline B' wrote: --tuned-baseline B",
        )
    if not isinstance(tuned.record, TunedProvenance):
        raise GateError(
            tuned.folder,
            "expected the identically fine-tuned BF16 draft (control), but this folder has no"
            " record of fine-tuning",
            fix="give the folder that 'draftquant retune --baseline B' wrote",
        )
    recorded = tuned.record.source.digests
    if recorded != baseline.digests_like(recorded):
        raise GateError(
            tuned.folder,
            f"was not made from {baseline.folder}",
            fix="give the draft that was fine-tuned, and the control that was made from it",
        )
    if tuned.sha256 != retuning.baseline_sha256:
        raise GateError(
            tuned.folder,
            f"belongs to another run of retune: expected tensors {retuning.baseline_sha256}, got"
            f" {tuned.sha256}",
            fix=f"give the control that was written together with {candidate.folder}",
        )
    return ()


def judge_retuned(
    replays: Sequence[DraftReplay],
    policy: Policy,
    *,
    background: Background,
    tuned_sha256: str,
    look: Look | None = None,
) -> RetunedReport:
    """Compare a candidate with the control, and with the draft as released.

    Args:
        replays: of the same traces in one call: the draft as released, the candidate, and the
            identically fine-tuned BF16 draft (control).
        policy: the limits of both comparisons.
        background: of the comparison with the draft as released.
        tuned_sha256: identity of the tensors of the control.
        look: see `judge`.

    Raises:
        GateError: as of `judge`.
    """
    baseline, candidate, tuned = replays
    released = dataclasses.replace(background, taught=True)
    against_bf16 = judge(baseline, candidate, policy, look=look, background=released)
    # What is known of the draft as released confirms the traces of both.
    known = None if background.expected_baseline is None else tuned.counts.mean_acceptance_length
    alike = dataclasses.replace(background, baseline_sha256=tuned_sha256, expected_baseline=known)
    against_tuned = judge(tuned, candidate, policy, look=look, background=alike)
    training = None
    if against_tuned.change is not None and against_bf16.change is not None:
        prompts = distinct_prompts(recorded_pairs(baseline, tuned))
        training = change_of(prompts, policy.confidence)
    return retuned_report(against_tuned, against_bf16, training)


def retuned_report(
    against_tuned: GateReport, against_bf16: GateReport, training: PairedChange | None
) -> RetunedReport:
    """What both comparisons say together; arguments as in `RetunedReport`."""
    verdict = worst([against_tuned.verdict, against_bf16.verdict])
    worse = against_tuned if against_tuned.verdict == verdict else against_bf16
    return RetunedReport(
        mark=MARK,
        rule=RULE,
        verdict=verdict,
        reason=f"{MARK}. Against the identically fine-tuned BF16 draft (quantization alone):"
        f" {against_tuned.verdict}. {against_tuned.reason} Against the BF16 draft as released"
        f" (quantization and fine-tuning): {against_bf16.verdict}. {against_bf16.reason}",
        action=worse.action,
        exit_code=EXIT_CODES[verdict],
        quantization_change=against_tuned.relative_change,
        training_change=None if training is None else training.relative_change,
        quantization_and_training_change=against_bf16.relative_change,
        against_tuned=against_tuned,
        against_bf16=against_bf16,
        training=training,
    )
