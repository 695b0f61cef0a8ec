"""`draftquant parity`: prints what speculation, or quantizing, changes of what is said."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..api.parity_divergence import parity_divergence
from ..api.parity_draft import parity_draft
from ..api.parity_run_tasks import parity_run_tasks
from ..api.parity_sampled import parity_sampled
from ..api.parity_tasks import parity_tasks
from ..console import print_json, print_table, stdout, table
from .gate_report import COLOURS
from .verbs import Below, Verbs, run_verb

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding, Findings


def run(options: argparse.Namespace) -> int:
    """Run the verb; the exit code is that of the worst finding."""
    return run_verb(options, VERBS)


def _divergence(options: argparse.Namespace) -> int:
    return _show(parity_divergence.run(options.settings), as_json=options.json)


def _sampled(options: argparse.Namespace) -> int:
    return _show(parity_sampled.run(options.settings), as_json=options.json)


def _tasks(options: argparse.Namespace) -> int:
    found = parity_tasks.run(options.settings)
    if not options.json:
        for one in found.findings:
            _print_scores(one)
    return _show(found, as_json=options.json)


def _draft(options: argparse.Namespace) -> int:
    found = parity_draft.run(options.settings)
    if not options.json:
        _print_parts(found.findings)
    return _show(found, as_json=options.json)


def _run_tasks(options: argparse.Namespace) -> int:
    samples = parity_run_tasks.run(options.settings)
    if options.json:
        print_json({task: {"samples": str(one.path), "items": {name: len(items) for name, items
                    in one.items.items()}} for task, one in samples.items()})  # fmt: skip
        return 0
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")
    return 0


VERBS: Verbs = {
    "divergence": Below(
        parity_divergence, _divergence, "compare greedy output with a draft to output without one"
    ),
    "tasks": Below(
        parity_tasks, _tasks, "compare the lm_eval scores of two servers on the same items"
    ),
    "run-tasks": Below(
        parity_run_tasks, _run_tasks, "run lm_eval tasks on a server, for 'parity tasks'"
    ),
    "sampled": Below(
        parity_sampled,
        _sampled,
        "compare how likely sampled output is to the target, with and without a draft",
    ),
    "draft": Below(
        parity_draft, _draft, "compare the proposals of a quantized draft to those of the BF16 one"
    ),
}


def _show(found: "Findings", *, as_json: bool) -> int:
    """Print findings, and give the exit code of the worst verdict."""
    from ...validate.parity.finding import to_mapping

    if as_json:
        print_json(to_mapping(found.findings))
    else:
        _print(found)
    return found.exit_code


def _print(found: "Findings") -> None:
    numbers = ("figure", "lower bound", "upper bound", "threshold")
    rows = table("Parity", "check", "of", *numbers, "verdict", right=numbers)
    for one in found.findings:
        rows.row(
            one.check,
            one.what,
            *(_number(x) for x in (one.estimate, one.lower, one.upper, one.threshold)),
            one.verdict,
            style=COLOURS[one.verdict],
        )
    print_table(rows)
    for one in found.findings:
        stdout().line((one.verdict, f"bold {COLOURS[one.verdict]}"), f": {one.what}: {one.reason}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _print_scores(one: "Finding") -> None:
    found = one.details[0]
    counts = ""
    if "mcnemar_p" in found:
        counts = (
            f"; only A right {found['only_first_right']}, only B right"
            f" {found['only_second_right']}, McNemar p = {found['mcnemar_p']:.3f}"
        )
    stdout().line(
        f"{one.what}: A {found['first']:.4f}, B {found['second']:.4f}"
        f" over {found['items']:,} items{counts}"
    )


def _print_parts(findings: "Sequence[Finding]") -> None:
    """By draft step and by category."""
    figures = [one.what for one in findings]
    found = table("By step and category", "of", *figures, right=(*figures,))
    parts = [(key, row[key]) for key in ("step", "category") for row in findings[0].details
             if key in row]  # fmt: skip
    for key, part in parts:
        cells = []
        for one in findings:
            own = [row["estimate"] for row in one.details if row.get(key) == part]
            cells.append(f"{own[0]:.5f}" if own else "")
        found.row(f"{key} {part}", *cells)
    print_table(found)
