"""`vocab`: rows of a draft's head, chosen by what its target says; written, or judged by size."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...recipes.brief import counted
from ...validate.runs.vocab_asked import VocabRun
from ..frame import reports
from ..frame.console import megabytes, print_table, stderr, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...calibration.vocabulary.cut_vocabulary import VocabularyReport
    from ...calibration.vocabulary.vocabulary_rows import Choosing, ChosenRows
    from ...validate.comparison.size_curve import ChoiceCurve, SizeChange, SizeCurve
    from ...validate.comparison.size_estimate import MachineSpeeds, SizeEstimate, SizeSpeed


@verb(VocabRun, one_of=("size", "coverage", "curve"))
def vocab(settings: VocabRun) -> "reports.VocabReport":
    """Cut a draft's head to the tokens that its target says, or find out how many it needs.

    With `curve=True` nothing is written: one replay gives the acceptance length at every size, with
    rows chosen by other prompts than those that judge it.

    Returns:
        The rows that were kept, what they cover of held-out text and what was written; or the
        curve.

    Raises:
        DraftQuantError: the draft, the traces or the counts cannot be read, do not belong together,
            or the vocabulary of this kind of draft cannot be cut.
    """
    from ...validate.runs.vocab_run import vocabulary_as_asked

    return vocabulary_as_asked(settings)


def _show(report: "reports.VocabReport", _settings: object) -> None:
    if report.curve is not None:
        _print_curve(report, report.curve)
    elif report.rows is not None and report.cut is not None:
        _print_rows(report.choosing, report.rows, report.cut)


def _mapping(report: "reports.VocabReport", _settings: object) -> dict[str, Any]:
    from ...validate.runs.vocab_run import to_mapping

    return to_mapping(report)


def _say_beside(report: "reports.VocabReport", settings: VocabRun) -> None:
    stderr().warnings(report.warnings)
    if settings.plot:
        stderr().line((str(settings.plot), "bold"), ": the curve")


def _print_rows(choosing: "Choosing", rows: "ChosenRows", cut: "VocabularyReport") -> None:
    out = stdout()
    _print_cut(cut)
    worst, share = rows.worst
    out.line(
        f"chosen by {choosing.said}: covers {rows.coverage:.2%} of these tokens, and"
        f" {rows.held_out:.2%} of them held out (each part of the prompts under rows that the"
        f" others choose); the worst category is {worst}, {share:.2%}"
    )
    if rows.more_than_asked:
        out.line(rows.more_than_asked)
    if rows.never_said:
        out.line(f"{rows.never_said:.2%} of the held-out tokens were said by no other part")
    whole = "WHOLE_DRAFT" if choosing.cuts else choosing.source.folder
    out.line(
        f"next: draftquant gate {whole} {cut.out} --traces OTHERS (of"
        " other prompts than those that chose the rows)"
    )


def _print_cut(cut: "VocabularyReport") -> None:
    out = stdout()
    out.line(
        (str(cut.out), "bold"),
        f": rows for {cut.size:,} of {cut.vocabulary:,} tokens ({cut.size_before:,} before),"
        f" {megabytes(cut.bytes_before)} -> {megabytes(cut.bytes_after)}, verified",
    )
    if cut.head_from is not None:
        out.line(
            f"the draft had no head of its own: its rows are those of the target's {cut.head_from}"
        )


def _print_curve(report: "reports.VocabReport", curve: "SizeCurve") -> None:
    out, choosing = stdout(), report.choosing
    out.line(
        (str(choosing.source.folder), "bold"),
        f": {curve.num_rows:,} rows of {choosing.chooser.vocab_size:,} tokens; rows chosen by"
        f" {choosing.said}, judged on {curve.judged_on}",
    )
    _print_way(curve, curve.chosen, report.estimate, "Rows chosen by all categories")
    if curve.off_domain is None:
        out.line(
            "off-domain is not judged: the traces have no other category than the prompts' own"
        )
    else:
        _print_way(
            curve,
            curve.off_domain,
            None,
            "Off-domain: rows chosen by all categories but the prompt's",
        )
    _print_categories(curve)
    out.line(
        f"bounds hold together with {curve.confidence:.0%} confidence: those of all prompts over"
        " the sizes, those of categories over sizes and categories"
    )
    if curve.too_small:
        out.line(
            f"categories with fewer than 10 prompts are not shown: {', '.join(curve.too_small)}"
        )
    if report.estimate is not None:
        _print_speeds(report.estimate)


def _print_way(
    curve: "SizeCurve", way: "ChoiceCurve", estimate: "SizeEstimate | None", title: str
) -> None:
    numbers = (
        "rows",
        "coverage",
        "acceptance length",
        "change",
        "bounds",
        "its change",
        "its bounds",
    )
    read = ("head reads", "drafting reads") if estimate else ()
    rows = table(
        f"{title}; K = {curve.num_draft_tokens}, {counted(curve.num_prompts, 'prompt')}",
        *numbers[:5],
        "worst category",
        *numbers[5:],
        *read,
        spare=(*read[:1], "its bounds"),
    )

    def reads(size: int) -> tuple[str, ...]:
        if estimate is None:
            return ()
        return megabytes(estimate.head_bytes[size]), megabytes(estimate.drafting_bytes[size])

    for place, change in enumerate(way.whole):
        worst = way.worst(place)
        rows.row(
            f"{change.size:,}",
            f"{change.coverage:.2%}",
            f"{change.acceptance_length:.4f}",
            *_change(change),
            *(("", "", "") if worst is None else (worst.scope, *_change(worst))),
            *reads(change.size),
        )
    rows.row(
        f"{curve.num_rows:,}",
        f"{curve.coverage:.2%}",
        f"{curve.acceptance_length:.4f}",
        *[""] * 5,
        *reads(curve.num_rows),
    )
    print_table(rows)


def _change(change: "SizeChange") -> tuple[str, str]:
    return f"{change.relative_change:+.2%}", f"{change.lower:+.2%} to {change.upper:+.2%}"


def _print_categories(curve: "SizeCurve") -> None:
    if not curve.chosen.categories[0]:
        return
    sizes = tuple(f"{size:,}" for size in curve.sizes)
    heads = (*sizes, *(f"{size} off-domain" for size in sizes if curve.off_domain))
    rows = table(
        "Change of the acceptance length by category",
        "category",
        "prompts",
        *heads,
    )
    ways = [curve.chosen, *([curve.off_domain] if curve.off_domain else [])]
    for number, change in enumerate(curve.chosen.categories[0]):
        cells = (
            f"{way.categories[place][number].relative_change:+.2%}"
            for way in ways
            for place in range(len(sizes))
        )
        rows.row(change.scope, str(change.num_prompts), *cells)
    print_table(rows)


def _print_speeds(estimate: "SizeEstimate") -> None:
    for number, speeds in enumerate(estimate.speeds):
        known = speeds.speeds[0].verify is not None
        numbers = ("rows", "drafting", "pays below", *(("speed-up", "bounds") if known else ()))
        verify = f", verify step {1e3 * (speeds.speeds[0].verify or 0):.3g} ms" if known else ""
        rows = table(
            f"Roofline on {speeds.gpu} at concurrency {speeds.concurrency}{verify}, context"
            f" {estimate.context:,}",
            *numbers,
        )
        for speed in speeds.speeds:
            cells = (f"{speed.size:,}", f"{1e6 * speed.drafting:,.1f} µs", _pays(speed, speeds))
            rows.row(*cells, *(_speed_up(speed) if known else ()))
        print_table(rows)
        for line in _advice(speeds, estimate.off_domain[number] if estimate.off_domain else None):
            stdout().line(line)
    if estimate.speeds and estimate.speeds[0].recommended is None:
        stdout().line(
            "pays below: the longest verify step of the target at which fewer rows are faster; give"
            " its time (--target-step-ms) for a recommended size"
        )


def _pays(speed: "SizeSpeed", speeds: "MachineSpeeds") -> str:
    if speed is speeds.speeds[-1]:
        return ""
    if speed.pays_below is None:
        return "never"
    return "always" if math.isinf(speed.pays_below) else f"{1e3 * speed.pays_below:,.3g} ms"


def _speed_up(speed: "SizeSpeed") -> tuple[str, str]:
    if speed.speed_up is None or speed.lower is None or speed.upper is None:
        return "", ""
    return f"{speed.speed_up:+.2%}", f"{speed.lower:+.2%} to {speed.upper:+.2%}"


def _advice(speeds: "MachineSpeeds", off_domain: "MachineSpeeds | None") -> Iterator[str]:
    best = speeds.recommended
    if best is None:
        return
    sizes = [f"{size:,}" for size in speeds.range if size != best.size]
    within = (
        f"; within the bounds {' or '.join(sizes)}" if sizes else "; at both ends of the bounds too"
    )
    yield (
        f"fastest on {speeds.gpu} at concurrency {speeds.concurrency}: {best.size:,} rows,"
        f" {best.speed_up or 0:+.2%}{within}"
    )
    if off_domain is not None and off_domain.recommended is not None:
        other = off_domain.recommended
        gain = f"{other.speed_up or 0:+.2%}"
        yield f"for traffic like none of the traces: {other.size:,} rows, {gain}"


COMMAND = Command(vocab, _show, _mapping, beside=_say_beside)
