"""Acceptance in a model card: the comparisons of the gate's report, as tables with intervals."""

import math
from pathlib import Path

from ...quantize.files.card_text import code, prose, table
from ..counting.paired_change import PairedChange
from ..errors import CardError
from ..judging.judgement import GateReport
from ..report import words
from ..report.document import Document, read_report


def read_gate(path: Path, candidate_sha256: str) -> Document:
    """Read a report of the gate; it is a report of this draft.

    Args:
        path: what `gate --report` wrote.

    Raises:
        GateError: it cannot be read, or is no such report.
        CardError: it is one of another draft, or does not know of which.
    """
    found = read_report(path)
    for _, each in found.comparisons:
        known = each.background
        if known.candidate_sha256 is None or known.baseline_sha256 is None:
            raise CardError(
                path,
                "does not know which drafts it judges: a sha256 of their tensors is null",
                fix="run the gate on both folders, or on measurements that were taken with --draft",
            )
    judged = {each.background.candidate_sha256 for _, each in found.comparisons}
    if judged != {candidate_sha256}:
        (other,) = sorted(filter(None, judged - {candidate_sha256}))[:1]
        raise CardError(
            path,
            f"judges a draft whose tensors are {other[:12]}, expected {candidate_sha256[:12]}",
            fix="run the gate on this folder, and give its report",
        )
    return found


def judges_drawn_text(found: Document) -> bool:
    """Whether text at a temperature was judged."""
    return any(each.traces is not None and each.traces.temperature > 0
               for _, each in found.comparisons)  # fmt: skip


def acceptance_section(found: Document) -> list[str]:
    """Paragraphs and tables, a table for each comparison."""
    parts = [f"Verdict of the gate: **{found.judgement.verdict}**."]
    for title, each in found.comparisons:
        target = _target(each)
        of = f" with target {code(target)}" if target else ""
        parts += [
            f"{title or 'Against the unquantized draft'}{of}, K = {each.num_draft_tokens},"
            f" {words.prompts(each.num_prompts, each.num_short_prompts)} distinct prompts, policy"
            f" {code(each.policy.name)}. Counted: {prose(each.estimand)}.",
            _table(each),
            prose(each.reason),
            *(f"Warning: {prose(warning)}" for warning in each.warnings),
        ]
    confidences = {each.change.confidence for _, each in found.comparisons if each.change}
    if confidences:
        at = ", ".join(f"{100 * one:.6g} %" for one in sorted(confidences))
        parts.append(f"Each bound is one-sided, at {at}; the samples are prompts.")
    parts += filter(None, (words.together(each.parts) for _, each in found.comparisons))
    return parts


def _target(found: GateReport) -> str | None:
    """The target's name, of replays or of servers."""
    if found.traces is not None:
        return found.traces.target.name
    return found.served.model if found.served is not None else None


def _table(found: GateReport) -> str:
    rows = [
        _row(own.category, own.num_prompts, own.baseline_mean_acceptance_length,
             own.candidate_mean_acceptance_length, own.change, own.max_relative_drop,
             own.outcome or "too few prompts")
        for own in found.parts.all
    ]  # fmt: skip
    whole = _row("all", found.num_prompts, found.baseline.mean_acceptance_length,
                 found.candidate.mean_acceptance_length, found.change,
                 found.policy.max_relative_drop, found.verdict)  # fmt: skip
    head = ("category", "prompts", "unquantized", "this draft", "change", "lower bound",
            "upper bound", "limit", "outcome")  # fmt: skip
    return table(head, [*rows, whole])


def _row(
    category: str,
    num_prompts: int,
    before: float,
    after: float,
    change: PairedChange | None,
    limit: float,
    outcome: str,
) -> tuple[str, ...]:
    logs = () if change is None else (change.log_ratio, change.lower, change.upper)
    bounds = [f"{math.expm1(log):+.2%}" for log in logs] or [""] * 3
    return (
        prose(category),
        f"{num_prompts:,}",
        f"{before:.4f}",
        f"{after:.4f}",
        *bounds,
        f"{-limit:+.2%}",
        outcome,
    )
