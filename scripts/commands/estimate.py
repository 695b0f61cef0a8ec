"""`draftquant estimate`: bytes, time and break-even acceptance of a draft, from headers alone."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...quantize.estimate.advice import advice
from ...quantize.estimate.estimate_report import (
    PARTS,
    EstimateReport,
    assumptions,
    multiplied_as,
    online_heads,
    to_mapping,
)
from ..api.estimate import estimate
from ..console import megabytes, print_json, print_table, stdout, table
from .length_table import print_lengths

if TYPE_CHECKING:
    from ...quantize.estimate.step_estimate import BreakEven, Candidate, Estimate
    from ...quantize.estimate.work import Machine

VERB = estimate
UNLOADED = "†"


def run(options: argparse.Namespace) -> int:
    """Estimate, and print what a step reads, how long it takes and what it may cost."""
    report = estimate.run(options.settings)
    if options.json:
        advised = {one.gpu.name: advice(report, one) for one in report.machines}
        print_json({**to_mapping(report), "advice": advised})
    else:
        print_report(report)
    return 0


def print_report(report: EstimateReport) -> None:
    """Print tables, what they say, and what they assume."""
    estimate, out = report.estimate, stdout()
    draft = estimate.draft
    out.line(
        (str(draft.checkpoint.folder), "bold"),
        f": {draft.family.name}, {estimate.parameters:,} parameters; K ="
        f" {estimate.num_draft_tokens}, context {estimate.context:,}, tp {estimate.tp}",
    )
    _print_parts(estimate)
    for line in _shares(estimate):
        out.line(line)
    _print_bytes(report)
    for name, reason in report.refused.items():
        out.line(f"{name} does not fit this draft: {reason}")
    _print_times(report)
    _print_contexts(report)
    for line in online_heads(report):
        out.line(line)
    for machine in report.machines:
        _print_break_even(report, machine)
        print_lengths(report, machine)
    if report.target is None:
        out.line(
            "break-even acceptance needs the target's verify step: --target-step-ms (measured, by"
            " concurrency), --target (config.json of a dense target) or --target-bytes"
        )
    out.line("Assumed", style="bold")
    for line in assumptions(report):
        out.line(f"  {line}")
    for machine in report.machines:
        out.line(advice(report, machine), style="bold")


def _print_parts(estimate: "Estimate") -> None:
    numbers = ("parameters", "share", "stored", "draft step reads", "drafting reads")
    found = table(
        f"Bytes of the draft's parts in {estimate.baseline.name}, at concurrency 1",
        "part",
        *numbers,
        right=numbers,
    )
    stored = {one.part: one for one in estimate.parts}
    whole = estimate.baseline.round
    for part in sorted(PARTS, key=lambda part: -whole.nbytes(1, part)):
        held, read = stored.get(part), whole.nbytes(1, part)
        if held is None and not read:
            continue
        found.row(
            part,
            f"{held.parameters:,}" if held else "",
            f"{held.parameters / estimate.parameters:.1%}" if held else "",
            f"{held.nbytes:,}" if held else "cache" if part == "kv_cache" else "target's",
            f"{whole.step.nbytes(1, part):,}",
            f"{read:,}",
        )
    found.add_section()
    total = (estimate.parameters, estimate.baseline.stored_bytes, whole.step.nbytes(1))
    found.row("total", f"{total[0]:,}", "", *(f"{n:,}" for n in (*total[1:], whole.nbytes(1))))
    print_table(found)


def _print_contexts(report: EstimateReport) -> None:
    """What drafting reads and takes by context length, where an FP8 cache is asked for."""
    if not report.by_context:
        return
    gpu, most = report.machines[0].gpu.name, report.concurrencies[-1]
    numbers = ("context", "cache, BF16", "FP8", "share", f"ms at {most}, BF16", "FP8 ", "saved")
    found = table(
        f"KV cache that drafting reads of a sequence for each verify step, and drafting on {gpu}",
        "form",
        *numbers,
        right=numbers,
    )
    for one in report.by_context:
        found.row(
            one.form,
            f"{one.context:,}",
            megabytes(one.cache_bytes),
            megabytes(one.fp8_cache_bytes),
            f"{one.cache_share:.1%}",
            f"{1e3 * one.seconds:.3f}",
            f"{1e3 * one.fp8_seconds:.3f}",
            f"{one.saved:.1%}",
        )
    print_table(found)


def _shares(estimate: "Estimate") -> Iterator[str]:
    """What recipes cannot reach, and what dropping or narrowing it would bring."""
    step = estimate.baseline.round.step
    layers = step.nbytes(1, "attention") + step.nbytes(1, "mlp")
    held = f"embedding and head are {estimate.shared_share:.1%} of the parameters, and"
    recipes = [one for one in estimate.candidates if not one.hypothetical]
    touched = [one.name for one in recipes if _quantizes_head(one)]
    quantize = f"quantize{'s' if len(touched) == 1 else ''}"
    whose = (
        f"only {', '.join(touched)} {quantize} the head" if touched else "no recipe touches them"
    )
    yield (
        f"{held} {whose}" if estimate.shared_share else "embedding and head are the target's"
    ) + (
        f"; attention and mlp, which recipes quantize, are {layers / step.nbytes(1):.1%} of the"
        " bytes of a step"
    )
    if estimate.dropped_bytes:
        yield (
            f"dropping embed_tokens would save {estimate.dropped_bytes:,} bytes on disk, and in"
            " memory if the engine does not share the target's table; a draft step gets no faster,"
            " since it reads only the rows of its tokens"
        )
    if estimate.reads_shared_head:
        yield (
            f"the head belongs to the target: each draft step reads its {step.nbytes(1, 'head'):,}"
            " bytes, whatever the draft's format"
        )
    for one in estimate.candidates:
        if one.form.of == estimate.baseline.name and (one.form.rows is None) != (not one.form.head):
            saved = step.nbytes(1) - one.round.step.nbytes(1)
            yield f"{_head(one)} would save {saved:,} bytes of a step"
    if not estimate.reads_shared_head:
        yield (
            "recipes keep the head unless a rule for it says otherwise (role: head), and"
            " 'draftquant vocab' cuts it"
        )


def _quantizes_head(one: "Candidate") -> bool:
    """Whether a recipe has a rule for the head, and the head is quantized by it."""
    return any(w.is_quantized for w in one.form.without_head().weights if w.row.role == "head")


def _head(one: "Candidate") -> str:
    if one.form.rows is not None:
        return f"a head of {one.form.rows:,} rows"
    return f"an {(one.form.head or '').upper()} head"


def _print_bytes(report: EstimateReport) -> None:
    estimate = report.estimate
    before = estimate.baseline
    numbers = ("stored", "attention", "mlp", "rest", "step", "share", "drafting", "share of it")
    found = table("Bytes read at concurrency 1", "draft", *numbers, "multiplied as", right=numbers,
                  spare=("share of it", "attention", "mlp", "rest"))  # fmt: skip
    for one in estimate.candidates:
        step, whole = one.round.step, one.round.nbytes(1)
        attention, mlp = step.nbytes(1, "attention"), step.nbytes(1, "mlp")
        found.row(
            one.name,
            megabytes(one.stored_bytes),
            megabytes(attention),
            megabytes(mlp),
            megabytes(step.nbytes(1) - attention - mlp),
            megabytes(step.nbytes(1)),
            f"{step.nbytes(1) / before.round.step.nbytes(1):.1%}",
            megabytes(whole),
            f"{whole / before.round.nbytes(1):.1%}",
            multiplied_as(one.round),
        )
    print_table(found)


def _print_times(report: EstimateReport) -> None:
    names = tuple(machine.gpu.name for machine in report.machines)
    found = table(
        "Roofline: draft step / all drafting in µs, at concurrency 1", "draft", *names, right=names
    )
    marks = set()
    for one in report.estimate.candidates:
        cells = []
        for machine in report.machines:
            step = _us(machine.pass_seconds(one.round.step, 1))
            whole = _us(machine.round_seconds(one.round, 1))
            mark = _mark(report, one, machine)
            marks.add(mark)
            cells.append(f"{step} / {whole}{mark}")
        found.row(one.name, *cells)
    print_table(found)
    if any(marks):
        stdout().line(f"{UNLOADED} no stock engine is known to load it there (draftquant check)")


def _print_break_even(report: EstimateReport, machine: "Machine") -> None:
    estimate, name = report.estimate, machine.gpu.name
    rows = {one: report.break_even(one, machine) for one in estimate.candidates}
    columns = [str(point.concurrency) for point in rows[estimate.baseline]]
    if not columns:
        return
    found = table(
        f"Break-even on {name}: the largest loss of acceptance length at which quantizing pays, by"
        " concurrency",
        "draft",
        *columns,
        right=tuple(columns),
    )
    points = rows.pop(estimate.baseline)
    found.row(
        "target's verify step, ms", *(f"{1e3 * point.verify_seconds:.3g}" for point in points)
    )
    ours = (machine.round_seconds(estimate.baseline.round, p.concurrency) for p in points)
    found.row(f"drafting with {estimate.baseline.name}, ms", *(f"{1e3 * s:.3g}" for s in ours))
    found.add_section()
    for one, of_one in rows.items():
        label = one.name + _mark(report, one, machine)
        found.row(label, *(_loss(point.loss) for point in of_one))
    print_table(found)
    real = [one for one in rows if report.engines(one, machine.gpu)]
    if not real:
        stdout().line(f"no stock engine is known to load any of these on {name}")
    else:
        best = max(real, key=lambda one: sum(point.loss for point in rows[one]))
        stdout().line(f"{best.name} on {name} {_pays(rows[best])}", style="bold")


def _mark(report: EstimateReport, candidate: "Candidate", machine: "Machine") -> str:
    if candidate is report.estimate.baseline or report.engines(candidate, machine.gpu):
        return ""
    return f" {UNLOADED}"


def _loss(loss: float) -> str:
    return f"{loss:.2%}" if loss > 0 else "no gain" if loss == 0 else f"slower by {-loss:.2%}"


def _pays(points: tuple["BreakEven", ...]) -> str:
    """In words: up to which loss it pays at the ends and in the middle."""
    good = [point for point in points if point.loss > 0]
    if not good:
        return "does not pay at any of these concurrencies, whatever its acceptance length"
    chosen = dict.fromkeys((good[0], good[len(good) // 2], good[-1]))
    said = ", ".join(f"{p.loss:.2%} at concurrency {p.concurrency}" for p in chosen)
    return f"pays if it loses less acceptance length than {said}"


def _us(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
