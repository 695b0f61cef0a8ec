"""Acceptance in a model card: the comparisons of a gate's JSON report, as tables with intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...quantize.files.card import code, prose, table
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..categories import CategoryFigures
from ..decision import Verdict
from ..doubts import Background
from ..errors import CardError
from ..gate import DraftFigures
from ..paired import PairedChange
from ..policy import Policy

_FIX = "give what `draftquant gate --report` wrote"
_LARGEST_LOG = 20.0  # of a ratio of acceptance lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a card says of one comparison; fields as in `GateReport`."""

    verdict: Verdict
    reason: str
    warnings: tuple[str, ...]
    policy: Policy
    estimand: str
    num_draft_tokens: int
    background: Background
    num_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    categories: tuple[CategoryFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFigures:
    """What a gate's report says.

    Attributes:
        verdict: of all comparisons together.
        comparisons: what each is against -> its figures.
        target: name of the target that was replayed or served; None = not said.
        is_drawn: text at a temperature was judged.
    """

    verdict: Verdict
    comparisons: Mapping[str, Comparison]
    target: str | None
    is_drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    verdict: Verdict


def read_gate(path: Path, candidate_sha256: str) -> GateFigures:
    """Read a report of the gate; it is a report of this draft.

    Args:
        path: what `gate --report` wrote.
        candidate_sha256: identity of the draft's tensors.

    Raises:
        CardError: it cannot be read, is no such report, or one of another draft.
    """
    try:
        report = parse_object(read_text(path))
        named = dict(_parts(report))
        found = GateFigures(
            verdict=_subset(_Whole, report).verdict,
            comparisons={name: _subset(Comparison, part) for name, part in named.items()},
            target=next(filter(None, map(_target, named.values())), None),
            is_drawn=any(map(_is_drawn, named.values())),
        )
        for each in found.comparisons.values():
            _check_ranges(each)
    except (OSError, JsonProblem) as exc:
        raise CardError(path, f"is no report of the gate: {exc}", fix=_FIX) from exc
    judged = {each.background.candidate_sha256 for each in found.comparisons.values()}
    if judged - {None, candidate_sha256}:
        (other,) = sorted(filter(None, judged - {candidate_sha256}))[:1]
        raise CardError(
            path,
            f"judges a draft whose tensors are {other[:12]}, expected {candidate_sha256[:12]}",
            fix="give the report on this very folder: run the gate on it",
        )
    return found


def acceptance_section(found: GateFigures) -> list[str]:
    """Paragraphs and tables, a table for each comparison."""
    parts = [f"Verdict of the gate: **{found.verdict}**."]
    for name, each in found.comparisons.items():
        of = f" with target {code(found.target)}" if found.target else ""
        parts += [
            f"Against {name}{of}, K = {each.num_draft_tokens}, {each.num_prompts} distinct"
            f" prompts, policy {code(each.policy.name)}. Counted: {prose(each.estimand)}.",
            _table(each),
            prose(each.reason),
            *(f"Warning: {prose(warning)}" for warning in each.warnings),
        ]
    confidences = {each.change.confidence for each in found.comparisons.values() if each.change}
    if confidences:
        at = ", ".join(f"{100 * one:.6g} %" for one in sorted(confidences))
        parts.append(f"Bounds are one-sided, at {at} each, over prompts.")
    return parts


def _table(found: Comparison) -> str:
    rows = [
        _row(own.category, own.num_prompts, own.baseline_mean_acceptance_length,
             own.candidate_mean_acceptance_length, own.change, own.max_relative_drop,
             own.outcome or "too few prompts")
        for own in found.categories
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


def _parts(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The comparisons in a report, of replays, of servers, or of both."""
    if "parity" not in report:
        return _replayed(report)
    found = []
    if isinstance(replayed := report.get("replayed"), dict):
        found += [(f"{name}, replayed", part) for name, part in _replayed(replayed)]
    if isinstance(served := report.get("served"), dict):
        found.append(("the unquantized draft, served", served))
    if not found:
        raise JsonProblem("replayed, served: expected one of them")
    return found


def _replayed(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if "against_tuned" not in report:
        return [("the unquantized draft", dict(report))]
    names = {
        "against_tuned": "the BF16 draft that was taught alike",
        "against_bf16": "the BF16 draft as released",
    }
    return [(name, _object(report, key)) for key, name in names.items()]


def _object(report: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(found := report.get(key), dict):
        raise JsonProblem(f"{key}: expected an object")
    return found


def _subset(hint: Any, report: Mapping[str, Any]) -> Any:
    """Decode the keys that `hint` has; a report says more than a card does."""
    names = [f.name for f in fields(hint)]
    return decode(hint, {name: report[name] for name in names if name in report})


def _target(part: Mapping[str, Any]) -> str | None:
    """The target's name, of replays or of servers."""
    for keys in (("traces", "target", "name"), ("served", "model")):
        found: Any = part
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    return None


def _is_drawn(part: Mapping[str, Any]) -> bool:
    traces = part.get("traces")
    return isinstance(traces, dict) and traces.get("temperature") not in (None, 0)


def _check_ranges(found: Comparison) -> None:
    """Numbers that can be printed."""
    for change in (found.change, *(each.change for each in found.categories)):
        if change is None:
            continue
        logs = (change.log_ratio, change.lower, change.upper)
        if max(map(abs, logs)) > _LARGEST_LOG or not 0.5 < change.confidence < 1:
            raise JsonProblem("change: no gate finds such bounds")
