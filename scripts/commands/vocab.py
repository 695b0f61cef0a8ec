"""`draftquant vocab`: rows of a draft's head by what its target says: written, or by size."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..api.vocab import vocab
from ..console import megabytes, print_json, print_table, stderr, stdout, table

if TYPE_CHECKING:
    from ...calibration.vocabulary.choosing import Choosing, ChosenRows
    from ...quantize.vocabulary.cut_vocabulary import VocabularyReport
    from ...validate.vocabulary.size_curve import ChoiceCurve, SizeChange, SizeCurve
    from ...validate.vocabulary.size_estimate import SizeEstimate
    from ...validate.vocabulary.size_speed import MachineSpeeds, SizeSpeed
    from ..api.reports import VocabReport

VERB = vocab


def run(options: argparse.Namespace) -> int:
    """Choose the rows, and print what was written or what every size costs."""
    report = vocab.run(options.settings)
    if options.json:
        print_json(to_mapping(report))
    elif report.curve is not None:
        _print_curve(report, report.curve)
    elif report.rows is not None and report.cut is not None:
        _print_rows(report.choosing, report.rows, report.cut)
    for warning in report.warnings:
        stderr().line(("warning:", "yellow"), f" {warning}")
    if options.settings.plot:
        stderr().line((str(options.settings.plot), "bold"), ": the curve")
    return 0


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


def _print_curve(report: "VocabReport", curve: "SizeCurve") -> None:
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
    found = table(
        f"{title}; K = {curve.num_draft_tokens}, {curve.num_prompts} prompts",
        *numbers[:5],
        "worst category",
        *numbers[5:],
        *read,
        right=(*numbers, *read),
        spare=(*read[:1], "its bounds"),
    )

    def reads(size: int) -> tuple[str, ...]:
        if estimate is None:
            return ()
        return megabytes(estimate.head_bytes[size]), megabytes(estimate.drafting_bytes[size])

    for place, one in enumerate(way.whole):
        worst = way.worst(place)
        found.row(
            f"{one.size:,}",
            f"{one.coverage:.2%}",
            f"{one.acceptance_length:.4f}",
            *_change(one),
            *(("", "", "") if worst is None else (worst.scope, *_change(worst))),
            *reads(one.size),
        )
    found.row(
        f"{curve.num_rows:,}",
        f"{curve.coverage:.2%}",
        f"{curve.acceptance_length:.4f}",
        *[""] * 5,
        *reads(curve.num_rows),
    )
    print_table(found)


def _change(one: "SizeChange") -> tuple[str, str]:
    return f"{one.relative_change:+.2%}", f"{one.lower:+.2%} to {one.upper:+.2%}"


def _print_categories(curve: "SizeCurve") -> None:
    """Both ways side by side, the change of the acceptance length."""
    if not curve.chosen.categories[0]:
        return
    sizes = tuple(f"{size:,}" for size in curve.sizes)
    heads = (*sizes, *(f"{size} off-domain" for size in sizes if curve.off_domain))
    found = table(
        "Change of the acceptance length by category",
        "category",
        "prompts",
        *heads,
        right=("prompts", *heads),
    )
    ways = [curve.chosen, *([curve.off_domain] if curve.off_domain else [])]
    for number, one in enumerate(curve.chosen.categories[0]):
        cells = (
            f"{way.categories[place][number].relative_change:+.2%}"
            for way in ways
            for place in range(len(sizes))
        )
        found.row(one.scope, str(one.num_prompts), *cells)
    print_table(found)


def _print_speeds(estimate: "SizeEstimate") -> None:
    for number, one in enumerate(estimate.speeds):
        known = one.speeds[0].verify is not None
        numbers = ("rows", "drafting", "pays below", *(("speed-up", "bounds") if known else ()))
        verify = f", verify step {1e3 * (one.speeds[0].verify or 0):.3g} ms" if known else ""
        found = table(
            f"Roofline on {one.gpu} at concurrency {one.concurrency}{verify}, context"
            f" {estimate.context:,}",
            *numbers,
            right=numbers,
        )
        for speed in one.speeds:
            cells = (f"{speed.size:,}", f"{1e6 * speed.drafting:,.1f} µs", _pays(speed, one))
            found.row(*cells, *(_speed_up(speed) if known else ()))
        print_table(found)
        for line in _advice(one, estimate.off_domain[number] if estimate.off_domain else None):
            stdout().line(line, style="bold")
    if estimate.speeds and estimate.speeds[0].recommended is None:
        stdout().line(
            "pays below: the longest verify step of the target at which fewer rows are faster; give"
            " its time (--target-step-ms) for a recommended size"
        )


def _pays(speed: "SizeSpeed", one: "MachineSpeeds") -> str:
    if speed is one.speeds[-1]:
        return ""
    if speed.pays_below is None:
        return "never"
    return "always" if math.isinf(speed.pays_below) else f"{1e3 * speed.pays_below:,.3g} ms"


def _speed_up(speed: "SizeSpeed") -> tuple[str, str]:
    if speed.speed_up is None or speed.lower is None or speed.upper is None:
        return "", ""
    return f"{speed.speed_up:+.2%}", f"{speed.lower:+.2%} to {speed.upper:+.2%}"


def _advice(one: "MachineSpeeds", off_domain: "MachineSpeeds | None") -> Iterator[str]:
    best = one.recommended
    if best is None:
        return
    sizes = [f"{size:,}" for size in one.range if size != best.size]
    within = (
        f"; within the bounds {' or '.join(sizes)}" if sizes else "; at both ends of the bounds too"
    )
    yield (
        f"fastest on {one.gpu} at concurrency {one.concurrency}: {best.size:,} rows,"
        f" {best.speed_up or 0:+.2%}{within}"
    )
    if off_domain is not None and off_domain.recommended is not None:
        other = off_domain.recommended
        gain = f"{other.speed_up or 0:+.2%}"
        yield f"for traffic like none of the traces: {other.size:,} rows, {gain}"


def to_mapping(report: "VocabReport") -> dict[str, Any]:
    """Plain data for JSON."""
    choosing = report.choosing
    found: dict[str, Any] = {
        "draft": str(choosing.source.folder),
        "traces": str(choosing.traces.folder),
        "traces_sha256": choosing.traces.sha256,
        "target": choosing.traces.manifest.target.name,
        "vocabulary": choosing.chooser.vocab_size,
        "num_rows": choosing.chooser.num_rows,
        "prompts": len(choosing.texts),
        "tokens": choosing.num_tokens,
        "distinct_tokens": choosing.num_distinct,
        "method": choosing.chooser.method,
        "warnings": list(report.warnings),
    }
    if report.rows is not None and report.cut is not None:
        rows = {**dataclasses.asdict(report.rows), "target_ids": list(report.rows.target_ids)}
        found |= {"rows": rows, "cut": _cut_mapping(report.cut)}
    if report.curve is not None:
        found["curve"] = dataclasses.asdict(report.curve)
        found["estimate"] = None if report.estimate is None else _estimate_mapping(report.estimate)
    return found


def _cut_mapping(cut: "VocabularyReport") -> dict[str, Any]:
    return {
        "out": str(cut.out),
        "size": cut.size,
        "size_before": cut.size_before,
        "head_from": cut.head_from,
        "bytes_before": cut.bytes_before,
        "bytes_after": cut.bytes_after,
        "verification": cut.verification.to_mapping(),
    }


def _estimate_mapping(estimate: "SizeEstimate") -> dict[str, Any]:
    def of(speeds: "tuple[MachineSpeeds, ...]") -> list[dict[str, Any]]:
        return [
            {
                "gpu": one.gpu,
                "concurrency": one.concurrency,
                "sizes": [_speed_mapping(speed) for speed in one.speeds],
                "recommended": None if one.recommended is None else one.recommended.size,
                "recommended_within_bounds": list(one.range),
            }
            for one in speeds
        ]

    bytes_by_size: Mapping[int, int] = estimate.drafting_bytes
    return {
        "drafting_bytes": {str(size): nbytes for size, nbytes in bytes_by_size.items()},
        "head_bytes": {str(size): nbytes for size, nbytes in estimate.head_bytes.items()},
        "context": estimate.context,
        "chosen": of(estimate.speeds),
        "off_domain": of(estimate.off_domain),
    }


def _speed_mapping(speed: "SizeSpeed") -> dict[str, Any]:
    """JSON has no infinity: a size that always pays says so."""
    found = dataclasses.asdict(speed)
    always = speed.pays_below is not None and math.isinf(speed.pays_below)
    return found | {"pays_below": None if always else speed.pays_below, "always_pays": always}
