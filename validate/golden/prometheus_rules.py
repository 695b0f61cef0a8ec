"""Rules for Prometheus: recorded acceptance of a live draft, and alerts where it fell below golden.

A rule knows one window at a time. Its bound is golden less the tolerated drop, less what chance
moves the mean of so many verify steps by, steps of one request being as alike as golden's are. It
looks again at every evaluation, so its error rate is that of one look: `draftquant watch` has a
test whose false alarms are bounded over all looks.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ...recipes.bounds import SHARE
from ...recipes.errors import visible
from ..errors import GoldenError
from .golden import Golden, GoldenCategory
from .promql import Queries

LENGTH = "draftquant:acceptance_length"
STEPS = "draftquant:verify_steps"
RATES = "draftquant:accepted_at"
NOISE = 3.09
"""Standard errors that a mean may lie below its limit by chance: once in 1,000 looks."""
LEAST_STEPS = 1000
"""Of a window, before its mean is judged."""
DEAD = 0.1
"""Of golden's accepted tokens per step: a draft that accepts less proposes noise."""
_FEW_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """When to alarm.

    Attributes:
        max_drop: relative drop of the mean acceptance length that is tolerated.
        window: over which counters are summed, in Prometheus' words.
    """

    max_drop: float
    window: str

    def limit(self, golden: GoldenCategory) -> float:
        """The mean acceptance length that must not be fallen below."""
        return golden.mean_acceptance_length * (1 - self.max_drop)

    def check(self, golden: GoldenCategory) -> None:
        """Refuse what is no drop of what these prompts accept.

        Raises:
            GoldenError: it is not above 0 and below 1, or no draft can accept less than the limit.
        """
        SHARE.check(GoldenError, "--max-drop", self.max_drop, fix="for example 0.03, which is 3 %")
        if (limit := self.limit(golden)) <= 1:
            most = 1 - 1 / golden.mean_acceptance_length
            raise GoldenError(
                "--max-drop",
                f"golden acceptance length {golden.mean_acceptance_length:.4f} less"
                f" {self.max_drop:.1%} is {limit:.4f}, and no draft falls below 1: the alert would"
                " never fire",
                fix=f"give a drop below {most:.4f}" if most > 0 else "monitor a draft that accepts",
            )


def prometheus_rules(golden: Golden, category: str, queries: Queries, alarm: Alarm) -> str:
    """A file of rules.

    Args:
        golden: of the draft that is served.
        category: of golden whose prompts are like the traffic; "" = all.
        queries: of the engine that serves it.
        alarm: when to alarm.
    """
    own = golden.categories[category]
    recorded = [
        {"record": STEPS, "expr": queries.verify_steps(alarm.window)},
        {"record": LENGTH, "expr": queries.acceptance_length(alarm.window)},
    ]
    if (rates := queries.accepted_at(alarm.window)) is not None:
        recorded.append({"record": RATES, "expr": rates})
    group = {
        "name": "draftquant",
        "rules": [*recorded, *_alerts(golden.draft, own, queries, alarm)],
    }
    body = yaml.safe_dump({"groups": [group]}, sort_keys=False, allow_unicode=True, width=1000)
    return f"{_heading(golden, own, category)}{body}"


def _alerts(
    draft: str, golden: GoldenCategory, queries: Queries, alarm: Alarm
) -> Sequence[dict[str, Any]]:
    limit, mean, window = alarm.limit(golden), golden.mean_acceptance_length, alarm.window
    spread = golden.variance_of_step * max(1.0, golden.design_effect or 1.0)
    own_error = ((golden.standard_error or 0) * (1 - alarm.max_drop)) ** 2
    model = queries.counters.model_label
    served = f"{{{{ $labels.{model} }}}}"
    return (
        _alert(
            "DraftAcceptanceFell",
            f"({LENGTH} < {limit:.6g} - {NOISE} * sqrt({own_error:.6g} + {spread:.6g} / {STEPS}))"
            f" and {STEPS} >= {LEAST_STEPS}",
            "15m",
            "warning",
            f'{served}: the draft\'s acceptance length fell to {{{{ $value | printf "%.3f" }}}}',
            f"Golden acceptance of {_plain(draft)} is {mean:.4f}, and a drop of more than"
            f" {alarm.max_drop:.1%} (below {limit:.4f}) is not chance. Look at the mixture of the"
            " traffic, then at what was deployed last: target, draft, engine.",
        ),
        _alert(
            "DraftAcceptsNothing",
            f"{LENGTH} < {1 + DEAD * (mean - 1):.6g} and {STEPS} >= {_FEW_STEPS}",
            "5m",
            "critical",
            f"{served}: the target accepts nothing of what the draft proposes",
            "Every draft step is wasted time. The draft was read wrongly, or belongs to another"
            " target: draftquant check DRAFT --target TARGET.",
        ),
        _alert(
            "DraftStopped",
            f"{queries.generated(window)} > 0 unless {queries.verify_steps(window)} > 0",
            "15m",
            "warning",
            f"{served}: the server writes text without drafting",
            "Tokens are generated, but no verify step is counted: speculation is off, or the engine"
            " switched it off under load.",
        ),
    )


def _alert(
    name: str, expr: str, lasting: str, severity: str, summary: str, description: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def _plain(text: str) -> str:
    """A name without what Prometheus would take for a template."""
    return re.sub(r"\{(?=\{)", "{ ", re.sub(r"\}(?=\})", "} ", text))


def _heading(golden: Golden, own: GoldenCategory, category: str) -> str:
    error = own.standard_error
    accuracy = "" if error is None or not math.isfinite(error) else f" +- {error:.4f}"
    of = f", category {category}" if category else ""
    lines = (
        f"Golden acceptance of {golden.draft}, K = {golden.num_draft_tokens}{of}:"
        f" {own.mean_acceptance_length:.4f}{accuracy}",
        f"over {own.prompts} prompts; tensors {golden.draft_sha256 or 'not known'}",
        f"Written by draftquant {golden.draftquant}: draftquant golden --for prometheus",
    )
    return "".join(f"# {visible(line)}\n" for line in lines)
