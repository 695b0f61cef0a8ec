"""Tables and sentences of how many tokens to draft, for `estimate`."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...quantize.estimate.advice import best_served
from ...quantize.estimate.draft_length import (
    LengthAdvice,
    LengthPoint,
    for_tensorrt_llm,
    for_vllm,
    said,
    schedule,
)
from ..console import print_table, stdout, table

if TYPE_CHECKING:
    from ...quantize.estimate.estimate_report import EstimateReport
    from ...quantize.estimate.work import Machine


def print_lengths(report: "EstimateReport", machine: "Machine") -> None:
    """Speeds by measured acceptance, which number of draft tokens is fastest, and schedules."""
    estimate, gpu = report.estimate, machine.gpu
    ours = report.lengths_of(estimate.baseline, gpu)
    if not ours:
        return
    columns = [str(one.concurrency) for one in ours]
    found = table(
        f"Tokens per second of a sequence on {gpu.name}, by measured acceptance and concurrency",
        "draft",
        *columns,
        right=tuple(columns),
    )
    for place, point in enumerate(ours[0].points):
        cells = (f"{one.points[place].tokens_per_second:,.1f}" for one in ours)
        found.row(_label(estimate.baseline.name, point), *cells)
    found.add_section()
    for candidate in estimate.candidates[1:]:
        advised = report.lengths_of(candidate, gpu)
        mark = "" if advised[0].own else " *"
        found.row(candidate.name + mark, *map(_gain, advised, ours))
    print_table(found)
    if any(not one.own for one in report.lengths):
        stdout().line(
            f"* with the acceptance of {estimate.baseline.name}: no counts of its own were given"
        )
    for line in _sentences(report, machine):
        stdout().line(line)


def _sentences(report: "EstimateReport", machine: "Machine") -> Iterator[str]:
    """K of the draft as it is, and of forms for which another one is advised."""
    told: dict[str, list[str]] = {}
    for candidate in report.estimate.candidates:
        advised = report.lengths_of(candidate, machine.gpu)
        told.setdefault(said(advised), []).append(candidate.name)
    for words, names in told.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"K on {machine.gpu.name} with {who}: {words}"
    best = best_served(report, machine)
    ours = report.lengths_of(report.estimate.baseline, machine.gpu)
    yield from _schedules(ours if best is None else report.lengths_of(best, machine.gpu))


def _schedules(advised: tuple[LengthAdvice, ...]) -> Iterator[str]:
    """Of the form that is advised, as engines are told."""
    ranges, name = schedule(advised), advised[0].form
    vllm, tensorrt_llm = for_vllm(ranges), for_tensorrt_llm(ranges)
    if vllm is None:
        yield f"{name}: nothing is to be drafted at any of these concurrencies"
        return
    yield f"{name}, vLLM's --speculative-config: {json.dumps(vllm)}"
    if tensorrt_llm is None:
        yield "TensorRT-LLM has no such schedule: K of its smallest batches must be the largest"
    else:
        yield f"{name}, TensorRT-LLM's speculative_config: {json.dumps(tensorrt_llm)}"


def _label(name: str, point: LengthPoint) -> str:
    if not point.num_draft_tokens:
        return "no draft"
    cut = f" of {point.drafted}" if point.drafted > point.num_draft_tokens else ""
    return f"{name}, K = {point.num_draft_tokens}{cut}"


def _gain(one: LengthAdvice, other: LengthAdvice) -> str:
    """Its best number of draft tokens, and how much faster than the best of the draft as it is."""
    gain = one.best.tokens_per_second / other.best.tokens_per_second - 1
    return f"K = {one.best.num_draft_tokens}, {gain:+.2%}"
