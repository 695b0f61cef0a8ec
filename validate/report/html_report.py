"""The report as a page: one file of HTML that loads nothing, runs nothing, and fits a phone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...quantize.gpus import gpu_name
from ...recipes.brief import apart
from ...recipes.errors import visible
from ...recipes.packages import package_version
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.paired_change import PairedChange
from ..judging.figures import DraftFigures, PromptFigures
from ..judging.judgement import GateReport
from ..judging.policy import in_percent, worst
from . import words
from .document import Document
from .plots import Interval, Lengths, contexts, forest, histogram, positions, scatter
from .svg import style_sheet
from .words import SideNames

MOST_DRAWN = 60
"""Most categories in a chart; the table has all."""


def _intervals(report: GateReport) -> tuple[Interval, ...]:
    """Rows of the forest plot: the whole, the categories with most prompts, and bins."""
    largest = sorted(report.categories, key=lambda part: -part.num_prompts)[:MOST_DRAWN]
    return (
        interval("all prompts", report.change, report.policy.max_relative_drop, whole=True),
        *(
            interval(part.category, part.change, part.max_relative_drop, judged=bool(part.outcome))
            for part in report.parts.all
            if part in largest or part.is_context_bin
        ),
    )


def _forest_of(drawn: Sequence[tuple[str, GateReport]]) -> str:
    rows = [
        replace(row, series=i) for i, (_, report) in enumerate(drawn) for row in _intervals(report)
    ]
    labels = list(dict.fromkeys(row.label for row in rows))
    rows.sort(key=lambda row: labels.index(row.label))
    before = [None, *(row.label for row in rows[:-1])]
    named = [
        replace(row, label="") if row.label == last else row
        for row, last in zip(rows, before, strict=True)
    ]
    first = drawn[0][1]
    assert first.change is not None
    return forest(
        "forest",
        named,
        title="Change of the acceptance length with its bounds, by category",
        bounds=f"one-sided {in_percent(first.change.confidence)} bounds"
        f"{', those of parts together' if first.parts.bounds_hold_together else ''}",
        series=[title for title, _ in drawn] if len(drawn) > 1 else (),
    )


def interval(label: str, change: PairedChange | None, limit: float, **looks: bool) -> Interval:
    """A change as a row of a forest plot; without a change it only shows its limit."""
    if change is None:
        return Interval(label=label, estimate=None, limit=-limit, whole=looks.get("whole", False))
    lower, upper = change.relative_bounds
    estimate = change.relative_change
    return Interval(label=label, estimate=estimate, lower=lower, upper=upper, limit=-limit, **looks)


SIGNS = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "?", "ANOMALOUS": "!"}
"""Marks beside the words, for those who scan; colours are only a third mark."""
_MOST_WORST = 10


def page(document: Document) -> str:
    """The whole page."""
    comparisons = document.comparisons
    decisive = worst(report.verdict for _, report in comparisons)
    charts_of = next(title for title, report in comparisons if report.verdict == decisive)
    drawn = [each for each in comparisons if each[1].change]
    return render(
        "page.html.j2",
        document=document,
        parts=[_part(*one, charts_of, drawn, document.sides) for one in comparisons],
        charts_of=charts_of,
        sides=document.sides,
        drafts=document.drafts,
        refused=sum(engine.verdict == "REFUSED" for engine in document.header.engines),
        launches=tuple(_launches(document)),
        provenance=tuple(_provenance(document)),
        signs=SIGNS,
    )


def render(template: str, *loaders: PackageLoader, **values: Any) -> str:
    """Render our own page: text from files is escaped, and made visible."""
    ours = PackageLoader(__package__, "")
    environment = Environment(
        loader=ChoiceLoader([*loaders, ours]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, _, _ = ours.get_source(environment, "page.css")
    named = {name: getattr(words, name) for name in WORDS} | {
        "apart": apart,
        "confidence": in_percent,
        "gpu_name": gpu_name,
    }
    return environment.get_template(template).render(
        **named,
        **values,
        style=Markup(style_sheet() + style),
        version=package_version("draftquant"),
    )


WORDS = ("change", "bounds", "limit", "length", "share", "count", "figure", "nbytes", "rows",
         "way_out", "estimator", "together")  # fmt: skip
"""Functions of `words` that templates use."""


def _of_one_depth(report: GateReport) -> GateReport:
    """Drafts that cannot be compared may each have another K: no step got beyond its own."""
    most = max(len(report.baseline.survival), len(report.candidate.survival))

    def deeper(draft: DraftFigures) -> DraftFigures:
        never = (0.0,) * (most - len(draft.survival))
        return replace(draft, histogram=draft.histogram + never, survival=draft.survival + never)

    return replace(report, baseline=deeper(report.baseline), candidate=deeper(report.candidate))


def _part(
    title: str,
    report: GateReport,
    charts_of: str,
    drawn: Sequence[tuple[str, GateReport]],
    sides: SideNames,
) -> dict[str, object]:
    """One comparison as the page shows it; a page has charts once, the worst prompts first."""
    report = _of_one_depth(report)
    prompts = tuple(map(_lengths, report.prompts))
    told = report.served is None or report.served.told_positions
    charts = _charts(report, told, prompts, drawn, sides) if title == charts_of else ()
    lost = sorted((p for p in prompts if p.change < 0), key=lambda p: p.change)
    return {
        "title": title,
        "comparison": report,
        "charts": [(caption, Markup(drawing)) for caption, drawing in charts],
        "worst": lost[:_MOST_WORST],
        "told_positions": told,
    }


def _charts(
    report: GateReport,
    told: bool,
    prompts: Sequence[Lengths],
    drawn: Sequence[tuple[str, GateReport]],
    sides: SideNames,
) -> Iterator[tuple[str, str]]:
    """Changes of all comparisons, everything else of the deciding one; they fill both columns.

    By position only if `told` how many tokens each verify step accepted.
    """
    before, after = report.baseline, report.candidate
    if drawn:
        left_out = max(0, len(report.categories) - MOST_DRAWN)
        more = f" ({left_out} smaller ones are in the table only)" if left_out else ""
        yield f"Change of the acceptance length, by category{more}", _forest_of(drawn)
    limit = report.policy.max_relative_drop
    square = f"Each prompt: acceptance length {sides.both}"
    if prompts and not report.context_bins:
        yield square, scatter(prompts, sides, limit=limit)
    if told:
        caption = "Share of verify steps that accepted the token at each position"
        yield caption, positions((before.survival, after.survival), sides)
    if report.context_bins:
        bins = [
            Lengths(
                label=part.category.removeprefix("context "),
                baseline=part.baseline_mean_acceptance_length,
                candidate=part.candidate_mean_acceptance_length,
            )
            for part in report.context_bins
        ]
        yield "Acceptance length by tokens before the verify step", contexts(bins, sides)
        yield square, scatter(prompts, sides, limit=limit)
    if told:
        caption = "Share of verify steps by number of accepted tokens"
        yield caption, histogram((before.histogram, after.histogram), sides)


def _lengths(prompt: PromptFigures) -> Lengths:
    baseline, candidate = (
        AcceptanceCounts(histogram=counts) for counts in (prompt.baseline, prompt.candidate)
    )
    return Lengths(
        label=prompt.id,
        category=prompt.category,
        baseline=baseline.mean_acceptance_length,
        candidate=candidate.mean_acceptance_length,
        steps=baseline.num_steps,
    )


def _launches(document: Document) -> Iterator[dict[str, str]]:
    gpus: dict[tuple[str, str], list[str]] = {}
    for facts in document.header.engines:
        if facts.launch is not None:
            what = f"{facts.verdict} in {facts.engine} {facts.version}"
            gpus.setdefault((what, facts.launch), []).append(gpu_name(facts.arch))
    for (what, command), archs in gpus.items():
        yield {"where": f"{what} on {', '.join(archs)}", "command": command}


def _provenance(document: Document) -> Iterator[tuple[str, str]]:
    _, report = document.comparisons[0]
    made = document.header.drafts.candidate.quantized
    yield "What is counted", f"{report.estimand}; {report.convention}"
    yield "Drafted tokens per verify step (K)", str(report.num_draft_tokens)
    if report.traces is not None:
        target = report.traces.target
        first = "First target" if document.of_targets else "Target"
        yield first, f"{target.name}, weights {words.digest(target.weights_sha256)}"
        yield "Traces", report.traces.sha256
        yield "Repeated 8-grams in the text", words.share(report.traces.repeated_8gram_share)
    if report.served is not None and document.of_targets:
        yield "Second target", report.served.model
    elif report.served is not None:
        yield "Served by", f"{words.server(report.served)}, {report.served.model}"
    looser = "; ".join(report.looser_than_release)
    yield "Policy", report.policy.name + (f", looser than release: {looser}" if looser else "")
    if made is not None:
        yield "Recipe", f"{made.recipe}, sha256 {made.recipe_sha256}"
    versions = {"draftquant": document.header.draftquant, **document.header.environment}
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if document.header.date is not None:
        yield "Date", document.header.date
    yield "Command", words.command(document.header.argv)
    if made is not None:
        yield "The draft was written by", words.command(made.argv)
    yield "Format", f"{document.header.format}, schema version {document.header.schema_version}"


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
