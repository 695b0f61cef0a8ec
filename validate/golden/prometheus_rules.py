"""Rules for Prometheus: recorded acceptance of a live draft, and alerts where it fell below golden.

A rule knows one window at a time. Its bound is the limit (see `limits`), less what chance moves the
mean of so many verify steps by, steps of one request being as alike as golden's are. It looks again
at every evaluation, so its error rate is that of one look.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any

import yaml

from ...recipes.errors import visible
from ..measure.protocols.engine_counters import MODEL_LABEL
from .golden import Golden
from .limits import Limit
from .promql import Queries, label_is

LENGTH = "draftquant:acceptance_length"
STEPS = "draftquant:verify_steps"
RATES = "draftquant:accepted_at"
BY_CHANCE = 0.001
"""Looks at which a mean lies below its bound by chance, of one category or all together."""
LEAST_STEPS = 1000
"""Of a window, before its mean is judged."""
DEAD = 0.1
"""Of golden's accepted tokens per step: a draft that accepts less proposes noise."""
_FEW_STEPS = 200
_SERVED = f"{{{{ $labels.{MODEL_LABEL} }}}}"


def prometheus_rules(golden: Golden, limits: Sequence[Limit], queries: Queries, window: str) -> str:
    """A file of rules.

    Args:
        limits: one; or one for each value of the category label that the queries have.
        window: over which counters are summed, in Prometheus' words.
    """
    recorded = [
        {"record": STEPS, "expr": queries.verify_steps(window)},
        {"record": LENGTH, "expr": queries.acceptance_length(window)},
    ]
    if (rates := queries.accepted_at(window)) is not None:
        recorded.append({"record": RATES, "expr": rates})
    noise = -NormalDist().inv_cdf(BY_CHANCE / len(limits))
    fallen = (
        alert
        for limit in limits
        for alert in _fallen(golden.draft, limit, queries.category_label, noise)
    )
    group = {"name": "draftquant", "rules": [*recorded, *fallen, _stopped(queries, window)]}
    body = yaml.safe_dump({"groups": [group]}, sort_keys=False, allow_unicode=True, width=1000)
    return f"{_heading(golden, limits)}{body}"


def _fallen(draft: str, limit: Limit, label: str, noise: float) -> Iterator[dict[str, Any]]:
    """Alerts of the traffic that one limit is for."""
    of = f", category {_plain(limit.category)}" if limit.category else ""
    only = f"{{{label_is(label, limit.category)}}}" if label else ""
    labels = {label: _plain(limit.category)} if label else {}
    length, steps, mean = f"{LENGTH}{only}", f"{STEPS}{only}", limit.golden.mean_acceptance_length
    yield _alert(
        "DraftAcceptanceFell",
        f"({length} < {limit.lowest:.6g} - {noise:.3g} * sqrt({limit.variance:.6g} / {steps}))"
        f" and {steps} >= {LEAST_STEPS}",
        "15m",
        {"severity": "warning", **labels},
        f'{_SERVED}{of}: the draft\'s acceptance length fell to {{{{ $value | printf "%.3f" }}}}',
        f"Golden acceptance of {_plain(draft)}{of} is {mean:.4f}, and an acceptance length below"
        f" {limit.lowest:.4f} ({limit.drop:.2%} lower: golden's own 95% interval, and the tolerated"
        f" drop of {limit.max_drop:.1%}) is not chance. It is a reason to look, not a verdict: look"
        " at the mixture of the traffic, then at what was deployed last: target, draft, engine. The"
        " gate on held-out prompts gives the verdict.",
    )
    yield _alert(
        "DraftAcceptsNothing",
        f"{length} < {1 + DEAD * (mean - 1):.6g} and {steps} >= {_FEW_STEPS}",
        "5m",
        {"severity": "critical", **labels},
        f"{_SERVED}{of}: the target accepts nothing of what the draft proposes",
        "Every draft step is wasted time. The draft was read wrongly, or belongs to another"
        " target: draftquant check DRAFT --target TARGET.",
    )


def _stopped(queries: Queries, window: str) -> dict[str, Any]:
    """Not by category: engines may label what they draft alone."""
    every = dataclasses.replace(queries, category_label="")
    return _alert(
        "DraftStopped",
        f"{every.generated(window)} > 0 unless {every.verify_steps(window)} > 0",
        "15m",
        {"severity": "warning"},
        f"{_SERVED}: the server writes text without drafting",
        "Tokens are generated, but no verify step is counted: speculation is off, or the engine"
        " switched it off under load.",
    )


def _alert(
    name: str, expr: str, lasting: str, labels: dict[str, str], summary: str, description: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": lasting,
        "labels": labels,
        "annotations": {"summary": summary, "description": description},
    }


def _plain(text: str) -> str:
    """A name without what Prometheus would take for a template."""
    return re.sub(r"\{(?=\{)", "{ ", re.sub(r"\}(?=\})", "} ", text))


def _heading(golden: Golden, limits: Sequence[Limit]) -> str:
    found = [
        f"Golden acceptance of {golden.draft}, K = {golden.num_draft_tokens}"
        f"{f', category {one.category}' if one.category else ''}:"
        f" {one.golden.mean_acceptance_length:.4f} +- {one.standard_error:.4f}"
        f" over {one.golden.prompts} prompts; alerts below {one.lowest:.4f}"
        for one in limits
    ]
    lines = (
        *found,
        f"Tensors {golden.draft_sha256 or 'not known'}",
        f"Written by draftquant {golden.draftquant}: draftquant golden --for prometheus",
    )
    return "".join(f"# {visible(line)}\n" for line in lines)
