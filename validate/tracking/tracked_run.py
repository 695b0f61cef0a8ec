"""What a tracker is told of a report: metrics, parameters and tags, the same for every tracker."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..counting.paired_change import PairedChange
from ..judging.categories import CategoryFigures
from ..judging.judgement import GateReport
from ..judging.retuned_gate import RetunedRecord
from ..report.document import Document
from ..report.facts import DraftFacts
from ..report.judged_again import Judgement

_NOT_IN_A_NAME = re.compile(r"[^\w\- ]")
"""Of a category: MLflow takes few characters in the name of a metric, and at most 250."""
_LONGEST_CATEGORY, _LONGEST_VALUE = 150, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One run.

    Attributes:
        name: of the candidate. verdict, reason: of all that was judged.
        metrics: acceptance lengths, changes with their bounds, prompts; those of a category under
            `category/NAME/`, those of one comparison of several under its name.
        params: who was judged, and by which rules.
        files: the JSON report first, then its pages.
    """

    name: str
    verdict: str
    reason: str
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    files: tuple[Path, ...]


def tracked_run(document: Document, files: tuple[Path, ...]) -> TrackedRun:
    """Make a run of a report.

    Args:
        document: of the gate.
        files: that were written of it, the JSON first.
    """
    comparisons = dict(_comparisons(document.judgement, ""))
    metrics: dict[str, float] = {}
    params = {"draftquant": document.header.draftquant}
    drafts = document.header.drafts
    for role in ("baseline", "candidate", "tuned"):
        facts = getattr(drafts, role)
        params |= _draft(role, facts) if facts is not None else {}
    for prefix, found in comparisons.items():
        metrics |= {f"{prefix}{name}": value for name, value in _metrics(found)}
        params |= {f"{prefix}{name}": str(value) for name, value in _rules(found)}
    return TrackedRun(
        name=drafts.candidate.name,
        verdict=document.judgement.verdict,
        reason=document.judgement.reason,
        metrics=metrics,
        params={key: value[:_LONGEST_VALUE] for key, value in params.items()},
        files=files,
    )


def _comparisons(judgement: Judgement, prefix: str) -> Iterator[tuple[str, GateReport]]:
    """Every comparison of two drafts, under what goes before the names of its figures."""
    if isinstance(judgement, GateReport):
        yield prefix, judgement
    elif isinstance(judgement, RetunedRecord):
        yield f"{prefix}against_tuned/", judgement.against_tuned
        yield f"{prefix}against_bf16/", judgement.against_bf16
    else:
        if judgement.replayed is not None:
            yield from _comparisons(judgement.replayed, "replayed/")
        if judgement.served is not None:
            yield "served/", judgement.served


def _metrics(found: GateReport) -> Iterator[tuple[str, float]]:
    yield "baseline_acceptance_length", found.baseline.mean_acceptance_length
    yield "candidate_acceptance_length", found.candidate.mean_acceptance_length
    yield "num_prompts", found.num_prompts
    yield from _change("", found.change)
    named = {f"category/{name}/": one for name, one in _named(found.categories).items()}
    named |= {f"{name}/": one for name, one in _named(found.context_bins).items()}
    for prefix, category in named.items():
        yield f"{prefix}baseline_acceptance_length", category.baseline_mean_acceptance_length
        yield f"{prefix}candidate_acceptance_length", category.candidate_mean_acceptance_length
        yield f"{prefix}num_prompts", category.num_prompts
        yield from _change(prefix, category.change)


def _named(categories: Sequence[CategoryFigures]) -> Mapping[str, CategoryFigures]:
    """Each under a name that a metric may have, and no other category has."""
    found: dict[str, CategoryFigures] = {}
    for category in categories:
        name = _NOT_IN_A_NAME.sub("_", category.category)[:_LONGEST_CATEGORY]
        while name in found:
            name += "_"
        found[name] = category
    return found


def _change(prefix: str, change: PairedChange | None) -> Iterator[tuple[str, float]]:
    if change is not None:
        lower, upper = change.relative_bounds
        yield f"{prefix}relative_change", change.relative_change
        yield f"{prefix}relative_change_lower", lower
        yield f"{prefix}relative_change_upper", upper
        yield f"{prefix}effective_sample_size", change.effective_num_prompts


def _rules(found: GateReport) -> Iterator[tuple[str, object]]:
    yield "num_draft_tokens", found.num_draft_tokens
    policy = found.policy
    yield "policy", policy.name
    for name in ("max_relative_drop", "max_category_drop", "confidence", "min_prompts"):
        yield name, getattr(policy, name)
    if found.draft_sampling is not None:
        yield "draft_sampling", found.draft_sampling
    if found.look is not None:
        yield "look", f"{found.look.number}/{found.look.total}"
    if found.traces is not None:
        yield "traces_sha256", found.traces.sha256
        yield "target", found.traces.target.name
        if found.traces.target.weights_sha256 is not None:
            yield "target_weights_sha256", found.traces.target.weights_sha256


def _draft(role: str, facts: DraftFacts) -> dict[str, str]:
    known = {role: facts.name}
    for name in ("sha256", "family", "hub_id", "revision"):
        value = getattr(facts, name)
        known |= {f"{role}_{name}": value} if value is not None else {}
    if facts.quantized is not None:
        for name in ("recipe", "recipe_sha256", "algorithm", "layout", "backend"):
            known[name] = getattr(facts.quantized, name)
    return known
