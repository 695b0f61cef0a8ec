"""Rules for Prometheus: recorded acceptance of a live draft, and alerts below golden.

The bound of an alert is the limit less what chance moves the mean of that many verify steps by,
with steps of one request as similar as golden's. Its error rate is that of one look at one window.
"""

import dataclasses
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import yaml

from ...recipes.decode import SHARE
from ...recipes.errors import GoldenError, short, visible
from ...recipes.packages import table_beside
from ..measure.measurement import EngineName
from ..measure.server_answers import ENGINE_COUNTERS, MODEL_LABEL, EngineCounters
from .golden_acceptance import ALL, Golden, GoldenCategory

ACCURACY = 1.96
"""Standard errors from golden's mean to the lower end of its 95 % interval, which one golden
acceptance in forty falls below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the acceptance of some traffic must not fall below, except by chance.

    It is the lower end of golden's 95 % interval less the tolerated relative drop; category
    "" = all.
    """

    category: str
    golden: GoldenCategory
    standard_error: float
    max_drop: float

    @property
    def lowest(self) -> float:
        """Mean acceptance length at the limit."""
        mean = self.golden.mean_acceptance_length
        return (mean - ACCURACY * self.standard_error) * (1 - self.max_drop)

    @property
    def drop(self) -> float:
        """Relative drop that raises no alert: the tolerated one, and golden's inaccuracy."""
        return 1 - self.lowest / self.golden.mean_acceptance_length

    @property
    def variance(self) -> float:
        """Variance of a mean over verify steps, times their number: a request's are similar."""
        return self.golden.variance_of_step * max(1.0, self.golden.design_effect or 1.0)


def limits_of(
    golden: Golden, max_drop: float, *, category: str = ALL, by_category: bool = False
) -> tuple[Limit, ...]:
    """The limit for traffic like a category ("" = all), or each category's, else GoldenError."""
    SHARE.check(GoldenError, "--max-drop", max_drop, fix="for example 0.01, which is 1 %")
    names: Sequence[str] = [category]
    if by_category:
        names = [name for name in golden.categories if name != ALL]
        if not names:
            raise GoldenError(
                "--category-label",
                "golden has no categories to hold its values against",
                fix="leave it out, or write golden acceptance of prompts with categories",
            )
    return tuple(_limit(name, golden.categories[name], max_drop) for name in names)


def _limit(category: str, golden: GoldenCategory, max_drop: float) -> Limit:
    where = f"golden, category {category!r}" if category else "golden"
    if not golden.standard_error:
        raise GoldenError(
            where,
            "does not say how much requests differ: it has one prompt, or all accept alike",
            fix="write it of more prompts (draftquant replay --golden)",
        )
    error = golden.standard_error
    limit = Limit(category=category, golden=golden, standard_error=error, max_drop=max_drop)
    if limit.lowest <= 1:
        mean = golden.mean_acceptance_length
        least = mean - ACCURACY * error
        raise GoldenError(
            "--max-drop",
            f"{where}: acceptance length {mean:.4f}, the lower end of whose 95% interval is"
            f" {least:.4f}, less {max_drop:.1%} is {limit.lowest:.4f}, and no draft falls below 1:"
            " the alert would never fire",
            fix=f"give a drop below {1 - 1 / least:.4f}"
            if least > 1
            else "write golden acceptance of more prompts, or monitor a draft that accepts",
        )
    return limit


_WINDOW = re.compile("".join(rf"([0-9]{{1,{digits}}}{unit})?" for unit, digits in
                             (("w", 4), ("d", 4), ("h", 5), ("m", 5), ("s", 5))))  # fmt: skip
"""Each unit once, the largest first, and below the 292 years that Prometheus can hold."""
_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def check_window(window: str) -> None:
    """Refuse what Prometheus would not accept as a time."""
    if not _WINDOW.fullmatch(window) or not re.search("[1-9]", window):
        raise GoldenError(
            "--window",
            f"expected a time such as 30m or 1h, got {window!r}",
            fix="give numbers with w, d, h, m or s, once each, in this order",
        )


def label_is(label: str, value: str) -> str:
    """The matcher of one value, quoted as PromQL does."""
    return f"{label}={json.dumps(value, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Expressions over one engine's counters, one result for each served target.

    `selector`: labels that all series must have, such as `model_name="m"`. Each value of
    `category_label` has a result of its own too; "" = none.
    """

    engine: EngineName
    selector: str = ""
    category_label: str = ""

    @classmethod
    def of(cls, engine: EngineName, model: str | None, category_label: str | None) -> "Queries":
        """Over the counters of one served target, or of all."""
        queries = cls(
            engine=engine,
            selector=label_is(MODEL_LABEL, model) if model else "",
            category_label=category_label or "",
        )
        taken = ("alertname", "severity", MODEL_LABEL, queries.counters.position_label)
        if category_label is not None and (
            not _LABEL.fullmatch(category_label) or category_label in taken
        ):
            got = short(category_label)
            raise GoldenError(
                "--category-label",
                f"expected a label of the counters that names categories, got {got}",
                fix="give the name of a label, such as category",
            )
        return queries

    @property
    def counters(self) -> EngineCounters:
        """Names and labels."""
        return ENGINE_COUNTERS[self.engine]

    def verify_steps(self, window: str) -> str:
        """Verify steps within a window such as 1h."""
        return self._increase(self.counters.verify_steps, window, self.counters.verify_matcher)

    def acceptance_length(self, window: str) -> str:
        """The mean of a window: 1 + accepted / verify steps; nothing where there was no step."""
        steps, counters = self.verify_steps(window), self.counters
        if accepted := counters.accepted or counters.accepted_at:
            return f"1 + {self._increase(accepted, window)} / ({steps} > 0)"
        emitted, first = self.generated(window), self._increase(counters.first_tokens, window)
        return f"({emitted} - {first}) / ({steps} > 0)"

    def accepted_at(self, window: str) -> str | None:
        """Share of the steps that accepted the token at each position; None = not counted."""
        counters, label = self.counters, self.counters.position_label
        if not counters.accepted_at:
            return None
        accepted = self._increase(counters.accepted_at, window, by=f"{self._by}, {label}")
        steps = self.verify_steps(window)
        return f"{accepted} / on ({self._by}) group_left () ({steps} > 0)"

    def generated(self, window: str) -> str:
        """Tokens written within a window, drafted or not."""
        return self._increase(self.counters.generated, window)

    def _increase(self, series: str, window: str, matcher: str = "", by: str = "") -> str:
        matchers = ", ".join(filter(None, (matcher, self.selector)))
        chosen = f"{{{matchers}}}" if matchers else ""
        grown = f"increase({series}{chosen}[{window}])"
        return f"sum by ({by or self._by}) ({grown})"

    @property
    def _by(self) -> str:
        return f"{MODEL_LABEL}, {self.category_label}" if self.category_label else MODEL_LABEL


LENGTH = "draftquant:acceptance_length"
STEPS = "draftquant:verify_steps"
RATES = "draftquant:accepted_at"
BY_CHANCE = 0.001
"""Looks at which a mean is below its bound by chance, for one category or all together."""
_NOISE_ALONE = 0.1  # of golden's accepted tokens per step


class _AlertWords(string.Template):
    delimiter = "@"  # that of Prometheus and of Grafana is $


def filled(value: Any, words: Mapping[str, Any]) -> Any:
    """The content of a table with words for its @NAMES; a name on its own may be any value."""
    if isinstance(value, Mapping):
        return {key: filled(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, words) for item in value]
    if not isinstance(value, str):
        return value
    alone = value[1:] if value.startswith("@") else ""
    return words[alone] if alone in words else _AlertWords(value).substitute(words)


def prometheus_rules(golden: Golden, limits: Sequence[Limit], queries: Queries, window: str) -> str:
    """A file of rules; `window`: over which counters are summed, in Prometheus' words."""
    rules = [
        {"record": STEPS, "expr": queries.verify_steps(window)},
        {"record": LENGTH, "expr": queries.acceptance_length(window)},
    ]
    if (rates := queries.accepted_at(window)) is not None:
        rules.append({"record": RATES, "expr": rates})
    noise = -NormalDist().inv_cdf(BY_CHANCE / len(limits))
    alerts, label = table_beside(__file__, "alerts"), queries.category_label
    for limit in limits:
        of_limit = filled(alerts["limit"], _words(golden.draft, limit, label, noise))
        for alert in of_limit if label else ():
            alert["labels"][label] = _plain(limit.category)
        rules += of_limit
    every = dataclasses.replace(queries, category_label="")
    drafted = {"generated": every.generated(window), "drafted": every.verify_steps(window)}
    rules += filled(alerts["engine"], drafted)
    groups = {"groups": [{"name": "draftquant", "rules": rules}]}
    body = yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, width=1000)
    return f"{_heading(golden, limits)}{body}"


def _words(draft: str, limit: Limit, label: str, noise: float) -> dict[str, str]:
    only = f"{{{label_is(label, limit.category)}}}" if label else ""
    mean = limit.golden.mean_acceptance_length
    return {
        "of": f", category {_plain(limit.category)}" if limit.category else "",
        "draft": _plain(draft),
        "length": f"{LENGTH}{only}",
        "steps": f"{STEPS}{only}",
        "mean": f"{mean:.4f}",
        "lowest": f"{limit.lowest:.4f}",
        "bound": f"{limit.lowest:.6g}",
        "noise": f"{noise:.3g}",
        "variance": f"{limit.variance:.6g}",
        "noise_alone": f"{1 + _NOISE_ALONE * (mean - 1):.6g}",
        "drop": f"{limit.drop:.2%}",
        "max_drop": f"{limit.max_drop:.1%}",
    }


def _plain(text: str) -> str:
    return re.sub(r"\{(?=\{)", "{ ", re.sub(r"\}(?=\})", "} ", text))


def _heading(golden: Golden, limits: Sequence[Limit]) -> str:
    figures = [
        f"Golden acceptance of {golden.draft}, K = {golden.num_draft_tokens}"
        f"{f', category {limit.category}' if limit.category else ''}:"
        f" {limit.golden.mean_acceptance_length:.4f} +- {limit.standard_error:.4f}"
        f" over {limit.golden.prompts} prompts; alerts below {limit.lowest:.4f}"
        for limit in limits
    ]
    lines = (
        *figures,
        f"Tensors {golden.draft_sha256 or 'not known'}",
        f"Written by draftquant {golden.draftquant}: draftquant golden --for prometheus",
    )
    return "".join(f"# {visible(line)}\n" for line in lines)
