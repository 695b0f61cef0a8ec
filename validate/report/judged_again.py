"""A report that is read is judged again: its verdict is that of its counts, whoever wrote the file.

The histograms of every prompt, the policy, the look and the background are taken as written; so is
what no counts show: see docs/report-format.md. All else has to follow. Sentences are not compared
but written anew, so that a later version may word them better.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...recipes.errors import short
from ..counting.acceptance_counts import AcceptanceCounts, pooled
from ..counting.draft_counts import (
    CountedDraft,
    PromptCounts,
    TextFigures,
)
from ..counting.estimand import estimand
from ..errors import GateError
from ..judging.figures import DraftFigures
from ..judging.judgement import GateReport, judge_counts
from ..judging.verdict import REPLAYED, Wording
from ..served.foreign_gate import FOREIGN
from ..served.joint_report import JointReport, joint_report
from ..served.served_gate import SERVED
from ..served.server_noise import DRIFT_CONFIDENCE, ServerNoise, judged_noise

Judgement = GateReport | JointReport
"""Of two drafts, or of several judgements."""
_INCOMPARABLE = ": no comparison is possible."
_FOLLOWING = (
    "verdict", "looser_than_release", "num_prompts", "num_copies", "num_short_prompts",
    "baseline", "candidate", "change", "required_num_prompts", "categories",
    "context_bins", "prompts",
    "num_clusters", "relative_change",
)  # fmt: skip
"""Keys of a comparison that its counts and limits decide."""
_ROUNDING = 1e-9  # of another machine's sums
_MOST_LEFT_OUT = 1_000_000


class _EditedError(Exception):
    """What does not follow, and where."""


def judged_again(found: Judgement) -> tuple[Judgement, str]:
    """Judge the counts of a report.

    Returns:
        What was read, its sentences as this version has them; and what does not follow from its
        counts, with where it stands, empty if all does.
    """
    try:
        if isinstance(found, GateReport):
            return _compared(found, _compare(found)), ""
        return _joint(found), ""
    except _EditedError as exc:
        return found, str(exc)
    except GateError as exc:  # counts that the gate refuses
        return found, exc.what


def _compare(found: GateReport) -> GateReport:
    """The verdict on the counts of a comparison."""
    if not 0 <= found.num_short_prompts <= _MOST_LEFT_OUT:
        raise _EditedError(f"num_short_prompts: got {found.num_short_prompts}")
    incomparable = ""
    if not found.prompts and found.reason.endswith(_INCOMPARABLE):
        incomparable = found.reason.removesuffix(_INCOMPARABLE)
    elif not found.prompts and not found.num_short_prompts:
        raise _EditedError("prompts: expected one at least")
    report = judge_counts(
        _draft(found, of_candidate=False),
        _draft(found, of_candidate=True),
        found.policy,
        incomparable=incomparable,
        estimand=_estimand(found),
        wording=_wording(found),
        look=found.look,
        background=found.background,
    )
    if incomparable:  # no counts show why
        report = dataclasses.replace(report, action=found.action)
    # Of replays alone, and taken as written.
    both = [
        dataclasses.replace(
            own, every_position_mean_acceptance_length=read.every_position_mean_acceptance_length
        )
        for own, read in ((report.baseline, found.baseline), (report.candidate, found.candidate))
    ]
    return dataclasses.replace(report, baseline=both[0], candidate=both[1])


def _wording(found: GateReport) -> Wording:
    """Of the way in which the drafts were counted."""
    if found.served is None:
        return REPLAYED
    return SERVED if found.served.tool is None else FOREIGN


def _compared(found: GateReport, again: GateReport) -> GateReport:
    """What was read, if it follows."""
    _check(found, {key: getattr(again, key) for key in _FOLLOWING})
    return dataclasses.replace(
        found,
        reason=again.reason,
        action=again.action,
        warnings=again.warnings,
        estimand=again.estimand,
    )


def _estimand(found: GateReport) -> str:
    """Of traces, it is known; what a server did is taken as written."""
    traces = found.traces
    if traces is None:
        return found.estimand
    return estimand(traces.temperature, traces.sampling, found.draft_sampling or "greedy")


def _draft(found: GateReport, *, of_candidate: bool) -> CountedDraft:
    """A draft's counts; the last prompts are those that were too short."""
    figures = found.candidate if of_candidate else found.baseline
    edges = found.context_edges
    told = [prompt.counts(edges, of_candidate=of_candidate) for prompt in found.prompts]
    _check_pooled(found, figures, told)
    nothing = AcceptanceCounts(histogram=(0.0,) * (found.num_draft_tokens + 1))
    short_one = PromptCounts(id="", category="", prompt_sha256="", counts=nothing)
    return CountedDraft(
        name=figures.name,
        num_draft_tokens=found.num_draft_tokens,
        prompts=(*told, *[short_one] * found.num_short_prompts),
        counts=AcceptanceCounts(histogram=figures.histogram),
        text=_text(found),
    )


def _text(found: GateReport) -> TextFigures:
    """What the report says of the text."""
    if found.traces is not None:
        return found.traces.text
    if found.served is None:
        raise _EditedError("traces, served: expected one of them")
    return TextFigures(
        mean_token_probability=found.served.mean_token_probability,
        num_near_duplicates=found.served.num_near_duplicates,
    )


def _check_pooled(
    found: GateReport, figures: DraftFigures, prompts: Sequence[PromptCounts]
) -> None:
    """A draft's counts are the sum of its prompts', but for served ones that were left out."""
    if not prompts:
        return
    sums = pooled((prompt.counts for prompt in prompts), found.num_draft_tokens).histogram
    whole = found.served is None or not found.num_short_prompts
    for own, summed in zip(figures.histogram, sums, strict=True):
        near = math.isclose(own, summed, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        if not near and (whole or own < summed):
            role = "candidate" if figures is found.candidate else "baseline"
            raise _EditedError(f"{role}.histogram: expected {summed:g} by its prompts, got {own:g}")


def _joint(found: JointReport) -> JointReport:
    served = None if found.served is None else _compare(found.served)
    replayed = None if found.replayed is None else _compare(found.replayed)
    again = joint_report(served=served, replayed=replayed, noise=_noise(found), parity=found.parity)
    _check(found, {"verdict": again.verdict})
    return dataclasses.replace(
        found,
        reason=again.reason,
        action=again.action,
        warnings=again.warnings,
        served=None if served is None or found.served is None else _compared(found.served, served),
        replayed=(
            None
            if replayed is None or found.replayed is None
            else _compared(found.replayed, replayed)
        ),
        noise=again.noise,
    )


def _noise(found: JointReport) -> ServerNoise | None:
    """By its two changes, whose counts no report has."""
    noise = found.noise
    if noise is None:
        return None
    if found.served is None:
        raise _EditedError("noise: expected served beside it")
    policy, change, drift = found.served.policy, noise.change, noise.drift
    for name, one, level in (("change", change, policy.confidence),
                             ("drift", drift, DRIFT_CONFIDENCE)):  # fmt: skip
        if one is not None and one.confidence != level:
            raise _EditedError(f"noise.{name}.confidence: expected {level}, got {one.confidence}")
    incomparable = ""
    if change is None and noise.verdict == "ANOMALOUS":
        incomparable = noise.reason.partition(":")[0]
    verdict, reason, action = judged_noise(incomparable, change, drift, policy)
    if noise.verdict != verdict:
        raise _EditedError(f"noise.verdict: expected {verdict}, got {noise.verdict}")
    return dataclasses.replace(noise, reason=reason, action=action)


def _check(found: object, expected: Mapping[str, Any]) -> None:
    """Raise the first key of which the report says something else."""
    for key, value in expected.items():
        for where, wanted, got in _differences(key, _plain(value), _plain(getattr(found, key))):
            raise _EditedError(f"{where}: expected {short(wanted)}, got {short(got)}")


def _plain(value: object) -> Any:
    """Without classes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _differences(where: str, wanted: Any, got: Any) -> Iterator[tuple[str, object, object]]:
    """Of two trees of plain data, from the top; numbers may differ by rounding."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        for key in wanted:
            yield from _differences(f"{where}.{key}", wanted[key], got[key])
    elif isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        if len(wanted) != len(got):
            yield where, f"{len(wanted)} of them", f"{len(got)}"
        for i, (one, other) in enumerate(zip(wanted, got, strict=False)):
            yield from _differences(f"{where}[{i}]", one, other)
    elif isinstance(wanted, float) and isinstance(got, int | float):
        if not math.isclose(wanted, got, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            yield where, wanted, got
    elif wanted != got:
        yield where, wanted, got
