"""The curve: coverage and acceptance length by the number of rows, held out, with its bounds.

Rows are chosen by all texts (except those of a prompt's own fold where no other traces judge),
and off-domain, by the texts of all categories except the prompt's own. The second shows what a user
loses whose traffic resembles none of the traces.

Bounds hold together: those of all prompts over the sizes, those of the categories over sizes and
categories. Both levels come from max-t; over all prompts the bounds are those of `paired_change`
at that level, which detect a loss that few prompts hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from ...calibration.passes.draft_inputs import MAX_TOKENS
from ...calibration.traces.trace_folder import TraceFolder
from ...calibration.vocabulary.row_choice import (
    RowChooser,
    RowOrder,
    SaidText,
    crosswise,
    said_texts,
)
from ...quantize.stored.loading import LoadedDraft
from ...recipes.brief import Brief
from ...recipes.listener import Progress, unseen
from ..counting.draft_counts import PromptCounts
from ..counting.paired_change import change_of_sums
from ..judging.policy import in_percent
from ..report.plots import Interval, forest
from ..report.svg import standalone
from .right_sizes import RightSizes, right_sizes
from .scopes import Contestant, CountedDrafts, ScopePrompts, count_drafts, samples_of, simultaneous

USUAL_SIZES = (8192, 16384, 32768, 65536)
_HALVES = 4
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChange:
    """One number of rows compared with all; `coverage` is the share of tokens that have a row."""

    size: int
    scope: str
    num_prompts: int
    coverage: float
    acceptance_length: float
    relative_change: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceCurve:
    """Rows chosen in one way: over all prompts by size, and for each size every large category."""

    whole: tuple[SizeChange, ...]
    categories: tuple[tuple[SizeChange, ...], ...]

    def worst(self, place: int) -> SizeChange | None:
        """The category that loses most at one of the sizes; None where there are none."""
        return min(self.categories[place], key=lambda change: change.relative_change, default=None)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SizeCurve(Brief):
    """Acceptance by the number of rows, in ascending `sizes` below that of the whole draft.

    `acceptance_length` and `coverage` are with all rows; `off_domain` None = the texts have one
    category; bounds of a scope have `confidence` together.
    """

    num_rows: int
    sizes: tuple[int, ...]
    judged_on: str
    num_draft_tokens: int
    num_prompts: int
    acceptance_length: float
    coverage: float
    chosen: ChoiceCurve
    off_domain: ChoiceCurve | None
    confidence: float
    too_small: tuple[str, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        least = self.chosen.whole[0]
        return {
            "sizes": f"{len(self.sizes)} sizes of {self.num_rows:,} rows",
            "at the least": f"{least.size:,} rows {least.relative_change:+.2%}",
            "acceptance length": f"{self.acceptance_length:.4f}",
            "K": self.num_draft_tokens,
            "prompts": self.num_prompts,
        }


def usual_sizes(num_rows: int) -> tuple[int, ...]:
    """8k, 16k, 32k and 64k for a large vocabulary; for a small one halves down to a sixteenth."""
    if num_rows > 2 * USUAL_SIZES[0]:
        return tuple(size for size in USUAL_SIZES if size < num_rows)
    halves = (num_rows >> shift for shift in range(_HALVES, 0, -1))
    return tuple(dict.fromkeys(size for size in halves if size))


def size_curve(
    draft: LoadedDraft,
    chooser: RowChooser,
    traces: TraceFolder,
    judge: TraceFolder | None,
    *,
    sizes: Sequence[int],
    num_draft_tokens: int,
    batch_size: int | None = None,
    max_tokens: int = MAX_TOKENS,
    on_progress: Progress = unseen,
) -> SizeCurve:
    """Choose rows by traces and judge every size, in one replay of the draft with all its rows.

    `judge` are traces of other prompts; None = the same, crosswise.
    """
    texts = said_texts(traces)
    judged = texts if judge is None else said_texts(judge)
    orders: list[RowOrder]
    parts: Sequence[int]
    if judge is None:
        orders, parts = crosswise(chooser, texts)
        judged_on = f"the prompts of the traces, crosswise in {len(orders)} parts"
    else:
        orders, parts = [chooser.order(texts)], [0] * len(judged)
        judged_on = f"other prompts: {judge.folder}"
    asked = [[place] for place in parts]
    outside = _off_domain(chooser, texts, {text.category for text in judged})
    for text, places in zip(judged, asked, strict=True):
        if outside:
            places.append(len(orders) + list(outside).index(text.category))
    orders += outside.values()
    sizes_by_text = right_sizes(
        draft,
        traces if judge is None else judge,
        orders,
        asked,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
        max_tokens=max_tokens,
        on_progress=on_progress,
    )
    ways = [
        _Way(judged, [orders[places[way]] for places in asked], [s[way] for s in sizes_by_text])
        for way in range(2 if outside else 1)
    ]
    drafts = [way.drafts((chooser.num_rows, *sizes)) for way in ways]
    samples = samples_of(drafts[0], {})
    curves = [way.curve(counted, sizes) for way, counted in zip(ways, drafts, strict=True)]
    return SizeCurve(
        num_rows=chooser.num_rows,
        sizes=tuple(sizes),
        judged_on=judged_on,
        num_draft_tokens=num_draft_tokens,
        num_prompts=samples[0].num_prompts,
        acceptance_length=float(np.exp(samples[0].log_lengths[0])),
        coverage=ways[0].coverage(chooser.num_rows),
        chosen=curves[0],
        off_domain=curves[1] if outside else None,
        confidence=CONFIDENCE,
        too_small=tuple(sample.name for sample in samples if not sample.is_compared),
    )


def _off_domain(
    chooser: RowChooser, texts: Sequence[SaidText], categories: set[str]
) -> dict[str, RowOrder]:
    """For each category, the order from the texts of all others; empty if one has no others."""
    orders = {}
    for category in sorted(categories):
        groups = {text.group for text in texts if text.category == category}
        others = [text for text in texts if text.group not in groups]
        if not sum(len(text.token_ids) for text in others):
            return {}
        orders[category] = chooser.order(others)
    return orders


@dataclass(frozen=True, slots=True)
class _Way:
    texts: Sequence[SaidText]
    orders: Sequence[RowOrder]
    sizes: Sequence[RightSizes]

    def drafts(self, sizes: Sequence[int]) -> CountedDrafts:
        return count_drafts([self._with_rows(size) for size in sizes])

    def _with_rows(self, size: int) -> Contestant:
        prompts = [
            PromptCounts(
                id=text.id,
                category=text.category,
                prompt_sha256=str(text.group),
                counts=right.counts(size),
            )
            for text, right in zip(self.texts, self.sizes, strict=True)
        ]
        return Contestant(name=f"{size} rows", sha256=None, prompts=prompts)

    def coverage(self, size: int, category: str | None = None) -> float:
        reached = total = 0
        for text, order in zip(self.texts, self.orders, strict=True):
            if category in (None, text.category):
                known = min(size, len(order.token_ids))
                reached += int((order.ranks[text.token_ids] < known).sum())
                total += len(text.token_ids)
        return reached / total if total else 0.0

    def curve(self, drafts: CountedDrafts, sizes: Sequence[int]) -> ChoiceCurve:
        whole, *categories = samples_of(drafts, {})
        compared = [sample for sample in categories if sample.is_compared]
        places = range(1, 1 + len(sizes))
        level = simultaneous([whole.change(0, place) for place in places], CONFIDENCE).each
        sums = list(zip(drafts.tokens, drafts.steps, strict=True))
        of_all = [
            change_of_sums(*sums[0], *sums[place], confidence=(1 + level) / 2) for place in places
        ]
        both = [(place, sample) for place in places for sample in compared]
        of_each = simultaneous([s.change(0, place) for place, s in both], CONFIDENCE).bounds
        bounds = dict(zip(((place, s.name) for place, s in both), of_each, strict=True))
        return ChoiceCurve(
            whole=tuple(
                self._change(whole, place, size, (bounds.lower, bounds.upper))
                for place, size, bounds in zip(places, sizes, of_all, strict=True)
            ),
            categories=tuple(
                tuple(self._change(s, place, size, bounds[place, s.name]) for s in compared)
                for place, size in zip(places, sizes, strict=True)
            ),
        )

    def _change(
        self, sample: ScopePrompts, place: int, size: int, bounds: tuple[float, float]
    ) -> SizeChange:
        change = sample.log_lengths[place] - sample.log_lengths[0]
        relative, lower, upper = (float(np.expm1(value)) for value in (change, *bounds))
        return SizeChange(
            size=size,
            scope=sample.name,
            num_prompts=sample.num_prompts,
            coverage=self.coverage(size, None if sample.is_whole else sample.name),
            acceptance_length=float(np.exp(sample.log_lengths[place])),
            relative_change=relative,
            lower=lower,
            upper=upper,
        )


def drawing(curve: SizeCurve, name: str) -> str:
    """The plot as a file."""
    series = ["rows chosen by all categories", "its worst category"]
    if curve.off_domain is not None:
        series += ["rows chosen by other categories", "its worst category"]
    title = "change of the acceptance length by rows of the head, and the held-out tokens in them"
    svg = forest(
        "sizes",
        [row for place in range(len(curve.sizes)) for row in _rows(curve, place)],
        title=f"{name}: {title}",
        bounds=f"{in_percent(curve.confidence)} intervals that hold together",
        series=series,
    )
    return standalone(svg)


def _rows(curve: SizeCurve, place: int) -> Iterator[Interval]:
    """Intervals of one size, without the wide bounds of small categories, which flatten all."""
    label = f"{curve.sizes[place]:,} ({curve.chosen.whole[place].coverage:.2%})"
    for i, way in enumerate(filter(None, (curve.chosen, curve.off_domain))):
        whole, worst = way.whole[place], way.worst(place)
        yield Interval(
            label="" if i else label,
            estimate=whole.relative_change,
            lower=whole.lower,
            upper=whole.upper,
            series=2 * i,
        )
        if worst is not None:
            yield Interval(label="", estimate=worst.relative_change, series=2 * i + 1)
