"""`draftquant quantize`: plan, write, verify, publish."""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.files.staging import check_output
from ...quantize.lints import Lint, find_lints
from ...quantize.plan import Plan, Step, make_plan
from ..console import Bar, megabytes, note, print_json, progress_bar, stderr, stdout
from .common import (
    add_allow_zero_rows,
    add_device,
    add_num_draft_tokens,
    add_recipe_arguments,
    add_subtree,
    add_target,
    chosen_recipe,
    draft_on_traces,
    open_draft,
)
from .learning import learn
from .loading import to_mapping, verdict_lines, verdicts_of, warn_if_nothing_loads

if TYPE_CHECKING:
    from ...calibration.linear_inputs.plan_inputs import PlanInputs
    from ...quantize.quantize import QuantizeReport


TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> what it loads."""


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
    from ...quantize.quantize import check_retuning, check_tables, quantize_draft

    source, draft = open_draft(options.draft, options.subtree)
    plan = make_plan(chosen_recipe(options), draft, target_layers=options.target_layers)
    check_retuning(plan, None)
    check_tables(plan, options.target)
    verdicts = verdicts_of(plan, fix_config=options.fix_config)
    warn_if_nothing_loads(plan, verdicts)
    check_output(options.out, plan.draft.checkpoint.folder)  # before anything that takes long
    seconds = _Stopwatch()
    with ExitStack() as stack:
        measuring = _Measuring()
        inputs = _inputs(plan, options, stack, measuring)
        bar = measuring.bar = stack.enter_context(progress_bar("check", None))
        phases = _Phases(bar, seconds, plan)

        def advance(step: Step) -> None:
            bar.advance(step.bytes_before)

        report = quantize_draft(
            plan,
            options.out,
            source=source,
            argv=options.argv,
            input_scales=inputs.static.scales if inputs.static else None,
            input_scale_origin=inputs.static.origin if inputs.static else None,
            statistics=inputs.statistics,
            found=inputs.found,
            calibration_prompts=inputs.prompts,
            allow_zero_rows=options.allow_zero_rows,
            fix_config=options.fix_config,
            target=options.target,
            on_progress=advance,
            on_stage=phases.begin,
            on_verified=bar.set,
        )
    seconds.start("")
    _print_lints(find_lints(draft), options)
    if options.json:
        print_json({**_mapping(report, seconds.spent), "engines": to_mapping(verdicts)})
    else:
        print_report(report, seconds.spent)
        for line in verdict_lines(verdicts):
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
    for norm, exponent in report.balanced.items():
        stdout().line(
            f"{norm}: divided by 2^{exponent}, the embedding columns behind it multiplied by it"
            " (balance_concat: the same network, both halves under one scale)"
        )


def _print_lints(lints: Sequence[Lint], options: argparse.Namespace) -> None:
    """What the source's lints did to config.json, and which ones are left; on stderr."""
    out = stderr()
    left = [lint for lint in lints if lint.level == "warning"]
    if options.fix_config:
        left = [lint for lint in left if not lint.fix]
        for lint in lints:
            for key, value in lint.fix.items():
                out.line(f"config.json: {key} = {json.dumps(value)} ({lint.name})")
    if not left:
        return
    fixable = [lint.name for lint in left if lint.fix]
    names = ", ".join(lint.name for lint in left)
    out.line(f"lints: {names}; see 'draftquant inspect {options.draft}'")
    if fixable:
        out.line(f"--fix-config corrects {', '.join(fixable)} in the output")


def _inputs(
    plan: Plan, options: argparse.Namespace, stack: ExitStack, measuring: "_Measuring"
) -> "PlanInputs":
    """Of `--input-scale` and `--traces`: what the recipe needs, or what the algorithm does."""
    from ...calibration.linear_inputs.plan_inputs import (
        PlanInputs,
        check_traces_wanted,
        measured_inputs,
        need_of,
    )
    from ...calibration.linear_inputs.static_scales import constant_scales
    from ...calibration.traces.feature_evidence import feature_evidence
    from ...calibration.traces.folder import TraceFolder

    constant = None if options.input_scale is None else constant_scales(plan, options.input_scale)
    if options.traces is None:
        return PlanInputs(static=constant)
    check_traces_wanted(plan, scale_is_given=constant is not None)
    traces = TraceFolder.open(options.traces)
    folder = plan.draft.checkpoint.folder
    draft, _, num_draft_tokens = draft_on_traces(folder, traces, options)
    spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="draftquant-moments-"))
    with progress_bar("calibrate", len(traces)) as bar:
        found = measured_inputs(
            plan,
            draft,
            traces,
            num_draft_tokens=num_draft_tokens,
            spool=Path(spool),
            static=constant,
            on_progress=bar.set,
            on_stage_progress=measuring,
        )
    if problem := feature_evidence(traces).problem():
        stderr().line(f"warning: {options.traces}: {problem}")
    if need_of(plan) != "codes" or plan.recipe.needs_input_scales:
        what = "input scales" if found.statistics is None else "inputs"
        note(f"{what} from {len(traces)} traces, steps 1..{num_draft_tokens}")
    if need_of(plan) != "codes":
        return found
    codes = learn(
        stack,
        plan,
        draft,
        traces,
        options.out,
        num_draft_tokens=num_draft_tokens,
        static=found.static,
    )
    return dataclasses.replace(found, found=codes)


class _Measuring:
    """Shows how far the measurement of a stage is, beside the tensors written."""

    bar: Bar | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many prompts of all."""
        if self.bar is not None:
            measured = f", inputs of {done} of {total} prompts" if done < total else ""
            self.bar.label(f"quantize{measured}")


class _Phases:
    """Shows and times the stages of a run."""

    def __init__(self, bar: Bar, seconds: "_Stopwatch", plan: Plan) -> None:
        self._bar, self._seconds, self._plan = bar, seconds, plan

    def begin(self, stage: str) -> None:
        """The next stage."""
        self._seconds.start(stage)
        if stage == "write":
            self._bar.phase("quantize", self._plan.bytes_before, "bytes")
        elif stage == "start":
            self._bar.phase(f"load {TOOLKITS[self._plan.recipe.backend]}")
        elif stage == "verify":
            self._bar.phase("verify", self._plan.bytes_before + self._plan.bytes_after, "bytes")
        else:
            self._bar.phase("write to the disk")


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
        "seconds": seconds,
        "verification": report.verification.to_mapping(),
    }
