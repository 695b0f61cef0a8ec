"""Task scores of two servers, item by item: does the second lose more than a margin?

McNemar's exact test and a score interval decide for right and wrong answers; for other scores,
Student's t of the differences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import optimize, stats

from ...recipes.errors import ParityError
from ..counting.paired_change import Bounded, pooled_mean
from .finding import Limits, ParityFinding, judged, limits
from .task_samples import Directions, Item, TaskSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Discordance:
    """How two servers did on n >= 1 items: b and c are the items that only one has right."""

    num_items: int
    only_first: int
    only_second: int

    @property
    def difference(self) -> float:
        """Share right of the second minus that of the first, (c - b) / n."""
        return (self.only_second - self.only_first) / self.num_items

    @property
    def share(self) -> float:
        """Discordant items among all, (b + c) / n."""
        return (self.only_first + self.only_second) / self.num_items


def mcnemar(discordance: Discordance) -> float:
    """Exact two-sided p of a split of b + c discordant items this uneven, if sides are equal."""
    total = discordance.only_first + discordance.only_second
    if not total:
        return 1.0
    return float(stats.binomtest(discordance.only_first, total, 0.5).pvalue)


def score_bounds(discordance: Discordance, confidence: float) -> tuple[float, float]:
    """One-sided bounds, in [-1, 1], of the difference d of shares: Tango's score interval (1998).

    With b, c and n items, the bounds are the d at which

        (c - b - n d) / sqrt(n (2 p + d (1 - d))) = +- z,

    p being the likeliest share of items that only the first has right, given d: p = (sqrt(B^2 - 8 n
    C) - B) / (4 n), B = (2 n + b - c) d - b - c, C = -b d (1 - d). Where nothing is discordant the
    bounds are -+ z^2 / (n + z^2), not nothing. Coverage by enumeration:
    tests/test_parity_tasks.py.
    """
    z = float(stats.norm.ppf(confidence))
    edge = 1 - 1e-12  # at -1 and 1 the score is 0 / 0
    distance = discordance.difference

    def bound(sign: float) -> float:
        def beyond(d: float) -> float:
            return _score(discordance, d) - sign * z

        end = -edge if sign > 0 else edge
        if sign * beyond(end) <= 0:
            return math.copysign(1.0, end)
        inner = min(max(distance, -edge), edge)
        return float(optimize.brentq(beyond, *sorted((end, inner)), xtol=1e-12))

    return bound(1.0), bound(-1.0)


_POWER = 0.8


def items_needed(
    share: float, difference: float, margin: float, *, confidence: float
) -> int | None:
    """Items with which a difference like this one clears the margin with probability `_POWER`.

    n = ((z_confidence + z_power) / (margin + difference))^2 * share, rounded up; None where no
    number is enough. `share` is of discordant items, `difference` of shares, second minus first.
    """
    slack = margin + difference
    if slack <= 0:
        return None
    z = float(stats.norm.ppf(confidence) + stats.norm.ppf(_POWER))
    return math.ceil(z**2 * share / slack**2)


def _score(discordance: Discordance, d: float) -> float:
    """Falls from above z to below -z as d rises."""
    n, b, c = discordance.num_items, discordance.only_first, discordance.only_second
    linear = (2 * n + b - c) * d - b - c
    constant = -b * d * (1 - d)
    # b counts as Tango's x21: its share is what d leaves.
    root = math.sqrt(max(0.0, linear * linear - 8 * n * constant))
    p = max(0.0, (root - linear) / (4 * n))
    variance = n * (2 * p + d * (1 - d))
    above = c - b - n * d
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)


_MORE = "compare more items"


def task_findings(
    first: Mapping[str, TaskSamples],
    second: Mapping[str, TaskSamples],
    *,
    max_score_drop: float | None,
    confidence: float,
    directions: Directions,
) -> tuple[ParityFinding, ...]:
    """Compare every metric of every filter of every task with a margin in the metric's own unit."""
    margin = limits("--max-score-drop", max_score_drop, least=-1)
    if first.keys() != second.keys():
        lacking = ", ".join(sorted(first.keys() ^ second.keys()))
        raise ParityError(
            "samples",
            f"tasks that only one of the two has: {lacking}",
            fix="run the same tasks against both servers",
        )
    findings = []
    for task, ours in first.items():
        theirs = second[task]
        _check_two_runs(ours, theirs)
        _check_same(ours, theirs)
        for name in sorted(ours.items):
            for metric in _metrics(ours, theirs, name):
                sign = 1.0 if directions.higher_is_better(metric, ours, theirs) else -1.0
                pairs = _pairs(ours.items[name], theirs.items[name], metric)
                label = f"{task} {metric}" + ("" if name == "none" else f", {name}")
                findings.append(_finding(label, pairs, sign, margin, confidence))
    if not findings:
        raise ParityError(
            "samples",
            "no metric is one number per item",
            fix="compare tasks that score each item",
        )
    return tuple(findings)


def _check_two_runs(first: TaskSamples, second: TaskSamples) -> None:
    """Two servers may answer everything equally: then their results, which have times, differ."""
    if first.sha256 != second.sha256:
        return
    if None in (first.results_sha256, second.results_sha256):
        why = "no results_DATE.json beside both shows that there were two runs"
    elif first.results_sha256 == second.results_sha256:
        why = "so are the results beside them"
    else:
        return
    raise ParityError(
        f"{first.path}, {second.path}",
        f"are equal byte for byte, and {why}: a run compared with itself shows nothing",
        fix="give the samples of the two servers, in the folders that lm_eval wrote",
    )


def _check_same(first: TaskSamples, second: TaskSamples) -> None:
    where = f"{first.path}, {second.path}"
    if first.items.keys() != second.items.keys():
        raise ParityError(where, "were filtered differently", fix="use one version of the task")
    for name, ours in first.items.items():
        theirs = second.items[name]
        lacking = ours.keys() ^ theirs.keys()
        if lacking:
            what = f"{len(lacking)} items are in one of the two only, such as doc_id {min(lacking)}"
            fix = "run both over the same documents (--limit, --samples)"
            raise ParityError(where, what, fix=fix)
        for number, item in ours.items():
            if item.sha256 != theirs[number].sha256:
                raise ParityError(
                    where,
                    f"doc_id {number}: another document, prompt, target or way to generate",
                    fix="run both with one version of the task, the same few-shot examples, seeds,"
                    " chat template and generation arguments",
                )


def _metrics(first: TaskSamples, second: TaskSamples, name: str) -> Sequence[str]:
    """Metrics of which items have one number: then every item has it, on both sides."""
    sides = [(s.path, item) for s in (first, second) for item in s.items[name].values()]
    metrics = sorted({metric for _, item in sides for metric in item.scores})
    for metric in metrics:
        lacking = [(path, item.number) for path, item in sides if metric not in item.scores]
        if lacking:
            path, number = lacking[0]
            raise ParityError(
                path,
                f"doc_id {number} has no number as {metric}, which {len(sides) - len(lacking)} of"
                f" the {len(sides)} samples of both sides have",
                fix="look into this item (an error of the server?), and run the task again",
            )
    return metrics


def _pairs(
    first: Mapping[int, Item], second: Mapping[int, Item], metric: str
) -> list[tuple[float, float]]:
    """Scores of different items: copies are no further evidence."""
    distinct = {item.sha256: number for number, item in sorted(first.items(), reverse=True)}
    return [(first[n].scores[metric], second[n].scores[metric]) for n in sorted(distinct.values())]


def _finding(
    label: str, pairs: Sequence[tuple[float, float]], sign: float, margin: Limits, confidence: float
) -> ParityFinding:
    """A finding on gains, `sign` times the second score minus the first."""
    count, gains = len(pairs), [sign * (second - first) for first, second in pairs]
    details: dict[str, object] = {"items": count}
    for name, scores in zip(("first", "second"), zip(*pairs, strict=True), strict=True):
        details[name] = sum(scores) / count
    remedy = _MORE
    if not {score for pair in pairs for score in pair} <= {0.0, 1.0}:
        bounded = pooled_mean(gains, [1.0] * count, confidence=confidence)
    else:
        counted = Discordance(
            num_items=count, only_first=gains.count(-1.0), only_second=gains.count(1.0)
        )
        lower, upper = score_bounds(counted, confidence)
        bounded = Bounded(
            estimate=counted.difference,
            lower=lower,
            upper=upper,
            confidence=confidence,
            num_clusters=count,
        )
        remedy = _remedy(counted, margin, confidence)
        details |= {
            "only_first_right": counted.only_first,
            "only_second_right": counted.only_second,
            "mcnemar_p": mcnemar(counted),
        }
    what = f"{label}, gain"
    return judged("task", what, bounded, margin, unit="item", remedy=remedy, details=[details])


def _remedy(counted: Discordance, margin: Limits, confidence: float) -> str:
    """How many items would settle it, at this discordance, if nothing is truly lost."""
    if margin.least is None or not counted.share or not margin.least:
        return _MORE
    needed = items_needed(counted.share, 0.0, -margin.least, confidence=confidence)
    return f"about {needed:,} items would settle it if in truth nothing is lost"
