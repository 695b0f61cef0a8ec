"""`draftquant quantize`: plan, write, verify, publish."""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...quantize.files.card_text import CARD_FILE, is_ours, read_card
from ..api.engine_verdicts import to_mapping, verdict_lines
from ..api.quantize import quantize
from ..console import OnTerminal, megabytes, print_json, stderr, stdout

if TYPE_CHECKING:
    from ..api.reports import QuantizeReport

VERB = quantize


def run(options: argparse.Namespace) -> int:
    """Quantize, and print what was written and where it loads."""
    seconds = _Stopwatch()
    report = quantize.run(dataclasses.replace(options.settings, listener=seconds))
    seconds.stage("")
    for lint in report.lints if options.settings.fix_config else ():
        for key, value in lint.fix.items():
            stderr().line(f"config.json: {key} = {json.dumps(value)} ({lint.name})")
    if not is_ours(read_card(report.out)):
        card = report.out / CARD_FILE
        stderr().line(
            f"{CARD_FILE} is the source's; 'draftquant card {report.out} --out {card} --overwrite'"
            " puts the quantized draft's card in front of it"
        )
    if options.json:
        print_json({**_mapping(report, seconds.spent), "engines": to_mapping(report.loads)})
    else:
        print_report(report, seconds.spent)
        for line in verdict_lines(report.loads):
            stdout().line(line)
    return 0


def print_report(report: "QuantizeReport", seconds: dict[str, float]) -> None:
    """Print what was written and what verification found."""
    plan = report.plan
    times = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items())
    changed = len(plan.quantized) + len(report.balanced.keys() | report.learned_norms.keys())
    kept = len(plan.remaining.rows) - changed
    stdout().line(
        (str(report.out), "bold"),
        f": {len(plan.quantized)} linears quantized, "
        f"{kept} tensors kept byte for byte, "
        f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}, verified ({times})",
    )
    for step in plan.dropped:
        name = step.row.tensor.name
        stdout().line(
            f"{name}: dropped, {megabytes(step.bytes_before)}; it equals the target's"
            f" {report.dropped[name]} byte for byte, which engines use instead"
        )
    if report.few_inputs:
        stdout().line(few_inputs_line(report.few_inputs))
    for norm, exponent in report.balanced.items():
        stdout().line(
            f"{norm}: divided by 2^{exponent}, the embedding columns behind it multiplied by it"
            " (balance_concat: the same network, both halves under one scale)"
        )
    if report.learned_norms:
        stdout().line(
            f"norms that learned: {', '.join(sorted(report.learned_norms))}; no element changed by"
            f" a factor of more than {max(report.learned_norms.values()):.4g}"
        )


def few_inputs_line(few: Mapping[str, int]) -> str:
    """What was not rounded as the recipe says, for too few tokens were routed to it."""
    first, seen = min(few.items(), key=lambda item: item[1])
    return (
        f"{len(few)} linears of experts were rounded to nearest: the traces route too few tokens"
        f" to them (fewest: {seen} inputs of {first}; all of them in draftquant.json: few_inputs)"
    )


class _Stopwatch(OnTerminal):
    """Wall seconds per stage; a stage ends when the next one starts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stage = ""
        self._since = time.perf_counter()

    @override
    def stage(self, name: str) -> None:
        now = time.perf_counter()
        if self._stage:
            spent = self.spent.get(self._stage, 0)
            self.spent[self._stage] = spent + now - self._since
        self._stage, self._since = name, now


def _mapping(report: "QuantizeReport", seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "recipe": report.plan.recipe.name,
        "bytes_before": report.plan.bytes_before,
        "bytes_after": report.plan.bytes_after,
        "quantized": [step.row.tensor.name for step in report.plan.quantized],
        "cuts": [{"size": one.size, "vocabulary": one.vocabulary} for one in report.cuts],
        "config_changes": dict(report.config_changes),
        "dropped": dict(report.dropped),
        "balanced": dict(report.balanced),
        "learned_norms": dict(report.learned_norms),
        "few_inputs": dict(report.few_inputs),
        "damping": dict(report.damping),
        "lints": [one.name for one in report.lints],
        "warnings": list(report.warnings),
        "seconds": seconds,
        "verification": report.verification.to_mapping(),
    }
