"""`draftquant quantize`: plan, write, verify, publish."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.files.card import CARD_FILE, is_ours, read_card
from ..api.loading import to_mapping, verdict_lines
from ..api.quantize import quantize
from ..console import OnTerminal, megabytes, print_json, stderr, stdout
from .common import (
    add_allow_zero_rows,
    add_device,
    add_num_draft_tokens,
    add_recipe_arguments,
    add_subtree,
    add_target,
    named_recipe,
)

if TYPE_CHECKING:
    from ...quantize.quantize import QuantizeReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`quantize DRAFT --recipe R --out O [--traces T] [--fix-config]`."""
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id (owner/name)")
    add_subtree(parser)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="TRACES",
        help="calibration traces for static activation scales and for algorithms that look at"
        " inputs",
    )
    parser.add_argument(
        "--input-scale",
        type=float,
        metavar="SCALE",
        help="one static activation scale for all linears",
    )
    add_num_draft_tokens(parser)
    add_device(parser)
    add_target(parser)
    add_allow_zero_rows(parser)
    parser.add_argument(
        "--fix-config",
        action="store_true",
        help="change the output's config.json as the lints of 'inspect' ask for",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    seconds = _Stopwatch()
    report = quantize(
        options.draft,
        named_recipe(options.recipe),
        options.out,
        subtree=options.subtree,
        backend=options.backend,
        algorithm=options.algorithm,
        target_layers=options.target_layers,
        traces=options.traces,
        input_scale=options.input_scale,
        num_draft_tokens=options.num_draft_tokens,
        device=options.device,
        target=options.target,
        allow_zero_rows=options.allow_zero_rows,
        fix_config=options.fix_config,
        argv=options.argv,
        on_stage=seconds.start,
        watch=OnTerminal(),
    )
    seconds.start("")
    for lint in report.lints if options.fix_config else ():
        for key, value in lint.fix.items():
            stderr().line(f"config.json: {key} = {json.dumps(value)} ({lint.name})")
    if not is_ours(read_card(report.out)):
        card = report.out / CARD_FILE
        stderr().line(
            f"{CARD_FILE} is the source's: 'draftquant card {report.out} --out {card} --overwrite'"
            " writes that of the quantized draft before it"
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
    kept = len(plan.remaining.rows) - len(plan.quantized) - len(report.balanced)
    stdout().line(
        (str(report.out), "bold"),
        f": {len(plan.quantized)} linears quantized, "
        f"{kept} tensors kept byte for byte, "
        f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}, verified ({times})",
    )
    for step in plan.dropped:
        name = step.row.tensor.name
        stdout().line(
            f"{name}: dropped, {megabytes(step.bytes_before)}: byte for byte the target's"
            f" {report.dropped[name]}, which engines take where the draft has none"
        )
    if report.few_inputs:
        stdout().line(few_inputs_line(report.few_inputs))
    for norm, exponent in report.balanced.items():
        stdout().line(
            f"{norm}: divided by 2^{exponent}, the embedding columns behind it multiplied by it"
            " (balance_concat: the same network, both halves under one scale)"
        )


def few_inputs_line(few: Mapping[str, int]) -> str:
    """What was not rounded as the recipe says, for too few tokens were routed to it."""
    first, seen = min(few.items(), key=lambda item: item[1])
    return (
        f"{len(few)} linears of experts were rounded to nearest: the traces route too few tokens"
        f" to them (fewest: {seen} inputs of {first}; all of them in draftquant.json: few_inputs)"
    )


class _Stopwatch:
    """Wall seconds per stage; a stage ends when the next one starts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stage = ""
        self._since = time.perf_counter()

    def start(self, stage: str) -> None:
        """End the running stage and begin the next ("" for none)."""
        now = time.perf_counter()
        if self._stage:
            spent = self.spent.get(self._stage, 0)
            self.spent[self._stage] = spent + now - self._since
        self._stage, self._since = stage, now


def _mapping(report: "QuantizeReport", seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "recipe": report.plan.recipe.name,
        "bytes_before": report.plan.bytes_before,
        "bytes_after": report.plan.bytes_after,
        "quantized": [step.row.tensor.name for step in report.plan.quantized],
        "config_changes": dict(report.config_changes),
        "dropped": dict(report.dropped),
        "balanced": dict(report.balanced),
        "few_inputs": dict(report.few_inputs),
        "lints": [one.name for one in report.lints],
        "warnings": list(report.warnings),
        "seconds": seconds,
        "verification": report.verification.to_mapping(),
    }
