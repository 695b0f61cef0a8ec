"""`draftquant parity draft`: proposals of a quantized draft against those of BF16."""

import argparse
from typing import TYPE_CHECKING

from ..console import print_table, progress_bar, table
from .parity_report import (
    add_confidence,
    add_report_arguments,
    check_report,
    report_findings,
)
from .replaying import add_trace_arguments, load_for_replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...validate.parity.finding import Finding

LIMITS = {
    "max-kl": "mean KL(BF16 || QUANT) per draft step, nats",
    "min-agreement": "share of steps with the same most likely token",
    "min-top-agreement": "shared part of the --top most likely tokens",
    "min-overlap": "mean sum of the smaller of both probabilities",
    "max-right-drop": "how much less often the most likely token may be the target's",
    "max-perplexity-rise": "of the draft's perplexity on the target's tokens, 1 %% = 0.01",
    "max-alpha-drop": "of the expected acceptance of drawn proposals (drawn traces)",
}


def _unit(option: str) -> str:
    return "NATS" if option == "max-kl" else "SHARE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity draft BF16 QUANT --traces T`."""
    parser.add_argument("baseline", metavar="BF16", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", help="the quantized draft")
    add_trace_arguments(parser)
    parser.set_defaults(batch_size=1)
    parser.add_argument(
        "--top",
        type=int,
        default=5,
        metavar="TOKENS",
        help="tokens of the set compared (default 5)",
    )
    for option, what in LIMITS.items():
        parser.add_argument(f"--{option}", type=float, metavar=_unit(option), help=what)
    add_confidence(parser)
    add_report_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.trace_replay import chosen_num_draft_tokens
    from ...validate.parity.draft_agreement import draft_agreement
    from ...validate.parity.draft_findings import DraftLimits, check_limits, draft_findings

    check_report(options)
    names = [option.replace("-", "_") for option in LIMITS]
    allowed = DraftLimits(**{name: getattr(options, name) for name in names})
    check_limits(allowed)
    traces = TraceFolder.open(options.traces)
    loaded = load_for_replay([options.baseline, options.candidate], traces, options)
    with progress_bar("compare", len(traces)) as bar:
        prompts = draft_agreement(
            *loaded.both,
            traces,
            num_draft_tokens=chosen_num_draft_tokens(options.num_draft_tokens, loaded.drafts),
            top=options.top,
            on_progress=bar.set,
        )
    findings = draft_findings(prompts, allowed, top=options.top, confidence=options.confidence)
    if not options.json:
        _print_parts(findings)
    return report_findings(findings, options)


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
