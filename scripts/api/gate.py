"""`gate`: may the quantized draft replace the BF16 one, by replays of both on the same traces?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.checkpoint import CONFIG_FILE
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.expectations import PolicyName
from ...validate.counting.estimand import DraftSampling
from .opening import Reference, folder_of, optional_path
from .replay import ComputeDtype, ReplaySettings, load_for_replay, replay_loaded
from .watch import SILENT, Watch

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.interim_analysis import Look, Spending
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy
    from ...validate.judging.retuned_gate import RetunedReport


def gate(
    baseline: Reference,
    candidate: Reference,
    traces: str | Path,
    *,
    tuned_baseline: Reference | None = None,
    policy: PolicyName = "release",
    max_relative_drop: float | None = None,
    confidence: float | None = None,
    min_prompts: int | None = None,
    every_category_passes: bool = False,
    unrecorded: bool = False,
    look: str | None = None,
    spending: "Spending | None" = None,
    unrelated: bool = False,
    expect_baseline: float | None = None,
    num_draft_tokens: int | None = None,
    draft_sampling: DraftSampling = "greedy",
    target: str | Path | None = None,
    device: str = "auto",
    dtype: ComputeDtype = "float32",
    batch_size: int | None = None,
    watch: Watch = SILENT,
) -> "GateReport | RetunedReport":
    """Judge a quantized draft against its BF16 source: PASS, FAIL, INCONCLUSIVE or ANOMALOUS.

    Example:
        >>> report = draftquant.gate("DRAFT", "OUT", "TRACES", min_prompts=10)
        >>> report.verdict in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
        True
        >>> report.exit_code == 0 or bool(report.action)
        True

    Args:
        baseline: folder or Hub id of the draft as released.
        candidate: of the quantized draft.
        traces: folder of traces whose prompts calibrated neither.
        tuned_baseline: the BF16 draft taught alike, for a candidate that `retune` wrote.
        policy: "release" or "screening", whatever the recipe of the candidate asks for.
        max_relative_drop: margin instead of the policy's, in (0, 1).
        confidence: of each one-sided bound, in (0.5, 1), instead of the policy's.
        min_prompts: instead of the policy's.
        every_category_passes: PASS only if every category with enough prompts passes.
        unrecorded: no record of how the candidate was quantized is asked for: another tool made it
            and none of these prompts calibrated it.
        look: "i/n": this is look i of n planned ones at a growing set of prompts.
        spending: how looks spend the error; see `validate.judging.interim_analysis`.
        unrelated: the candidate is on purpose not the baseline quantized.
        expect_baseline: acceptance length that the baseline is known to have with this K.
        num_draft_tokens: see `ReplaySettings`, as all that follow.
        draft_sampling: likewise.
        target: likewise.
        device: likewise.
        dtype: likewise.
        batch_size: likewise.
        watch: sees how far the run is.

    Returns:
        The verdict and all that it rests on; of two comparisons where the target taught the draft.

    Raises:
        GateError: the drafts do not belong together, or a limit is none.
        DraftQuantError: see `replay`.
    """
    from ...validate.judging.interim_analysis import parse_look
    from ...validate.judging.policy import resolve_policy

    chosen = resolve_policy(
        policy,
        max_relative_drop=max_relative_drop,
        confidence=confidence,
        min_prompts=min_prompts,
        every_category_passes=every_category_passes,
        unrecorded=unrecorded,
    )
    return judge_on_traces(
        Judged(
            baseline=baseline,
            candidate=candidate,
            tuned_baseline=tuned_baseline,
            traces=Path(traces),
            unrelated=unrelated,
            expect_baseline=expect_baseline,
        ),
        chosen,
        parse_look(look, spending),
        ReplaySettings(
            num_draft_tokens=num_draft_tokens,
            draft_sampling=draft_sampling,
            target=optional_path(target),
            device=device,
            dtype=dtype,
            batch_size=batch_size,
        ),
        watch,
    ).report


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What is judged; fields as in `gate`."""

    baseline: Reference
    candidate: Reference
    tuned_baseline: Reference | None
    traces: Path
    unrelated: bool
    expect_baseline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTraces:
    """What replays said; `background` is what they were judged with.

    Attributes:
        folders: baseline, candidate, and the BF16 draft taught alike where it was given.
    """

    replays: "Sequence[DraftReplay]"
    report: "GateReport | RetunedReport"
    background: "Background"
    folders: "tuple[DraftFolder, ...]"


def judge_on_traces(
    judged: Judged,
    policy: "Policy",
    look: "Look | None",
    settings: ReplaySettings,
    watch: Watch = SILENT,
) -> OnTraces:
    """Replay both drafts, or all three, and judge the candidate.

    Raises:
        DraftQuantError: see `gate`.
    """
    from ...calibration.traces.head_agreement import head_agreement
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
    from ...validate.judging.held_out import check_held_out
    from ...validate.judging.judgement import judge
    from ...validate.judging.retuned_gate import check_tuned_baseline, judge_retuned

    unrelated, references = judged.unrelated, [judged.baseline, judged.candidate]
    baseline, candidate = (DraftFolder.read(folder_of(name)) for name in references)
    tuned = None
    if judged.tuned_baseline:
        references.append(judged.tuned_baseline)
        tuned = DraftFolder.read(folder_of(judged.tuned_baseline))
    warnings = check_folders(baseline, candidate, unrelated=unrelated)
    warnings += check_tuned_baseline(baseline, candidate, tuned, unrelated=unrelated)
    traces = TraceFolder.open(judged.traces)
    warnings += check_held_out(candidate.quantized_by, traces)
    loaded = load_for_replay(references, traces, settings, watch)
    warnings += check_loaded(*loaded.both, candidate, unrelated=unrelated)
    if tuned is not None:
        warnings += check_loaded(loaded.drafts[0], loaded.drafts[2], tuned)
    warnings += _target_warnings(settings.target, traces) + _text_warnings(traces)
    warnings += other_policy_warnings(candidate.quantized_by, policy.name)
    replays = replay_loaded(loaded, settings, watch)
    background = Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        head_agreement=head_agreement(traces, loaded.tables),
        expected_baseline=judged.expect_baseline,
        unrelated=unrelated,
        unrecorded=not unrelated and candidate.quantized_by is None,
        algorithm_to_try=algorithm_to_try(candidate.quantized_by),
        warnings=warnings,
    )
    report: GateReport | RetunedReport
    if tuned is None:
        report = judge(replays[0], replays[1], policy, look=look, background=background)
    else:
        report = judge_retuned(
            replays, policy, look=look, background=background, tuned_sha256=tuned.sha256
        )
    folders = (baseline, candidate) if tuned is None else (baseline, candidate, tuned)
    return OnTraces(replays=replays, report=report, background=background, folders=folders)


def other_policy_warnings(candidate: QuantizedProvenance | None, policy: str) -> tuple[str, ...]:
    """A candidate does not choose its own judge, but what its recipe asks for is said."""
    if candidate is None or policy in (candidate.recipe.gate.policy, "custom"):
        return ()
    asked = candidate.recipe.gate.policy
    return (f"the candidate's recipe asks for the policy {asked!r}, in use is {policy!r}",)


def algorithm_to_try(candidate: QuantizedProvenance | None) -> str | None:
    """What may round the candidate's four bits better than it was done."""
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.number.is_fp8 else "gptq"


def _text_warnings(traces: "TraceFolder") -> tuple[str, ...]:
    """Text that no user is served."""
    if not traces.manifest.ignore_eos:
        return ()
    return (
        "the traces go on behind the target's end of text (record --ignore-eos): what it writes"
        " there, often itself again, is guessed more easily than answers are",
    )


def _target_warnings(target: Path | None, traces: "TraceFolder") -> tuple[str, ...]:
    """The tables of a target that was not recorded make another draft of both."""
    from ...calibration.traces.trace_folder import file_sha256

    recorded = traces.manifest.target
    if target is None or file_sha256(target / CONFIG_FILE) == recorded.config_sha256:
        return ()
    if recorded.config_sha256 is None:
        return (
            f"the traces do not say which {CONFIG_FILE} their target {recorded.name} had: whether"
            f" --target {target.name} is that target is not known",
        )
    return (
        f"--target {target.name} has another {CONFIG_FILE} than the target {recorded.name} that was"
        " recorded: embedding and head may be those of another target",
    )
