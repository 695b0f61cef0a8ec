"""`draftquant retune`: a quantized draft taught by its target, and the BF16 draft taught alike."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.plan import make_plan
from ...recipes import Recipe
from ..console import Bar, megabytes, note, print_json, progress_bar, stdout
from .common import (
    add_allow_zero_rows,
    add_device,
    add_num_draft_tokens,
    add_target,
    add_target_layers,
    draft_on_traces,
    named_recipe,
    open_draft,
)

if TYPE_CHECKING:
    from ...calibration.rounding.retune_draft import RetuneReport, Side
    from ...calibration.rounding.validation import LearningProgress
    from ...quantize.files.provenance import LearnedRounding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`retune DRAFT --recipe R --traces T --out O --baseline B`."""
    parser.add_argument("draft", metavar="DRAFT", help="BF16 draft folder or Hub id (owner/name)")
    parser.add_argument(
        "--recipe", required=True, metavar="RECIPE", help="format: built-in name or .yaml path"
    )
    parser.add_argument(
        "--traces",
        required=True,
        type=Path,
        metavar="TRACES",
        help="what the target did on prompts that the gate will not judge, 160 or more",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="quantized draft folder to create"
    )
    parser.add_argument(
        "--baseline",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="folder to create, of the BF16 draft taught alike: what --out is compared with; one"
        " that the same traces and settings gave is used again",
    )
    add_num_draft_tokens(parser)
    add_device(parser)
    add_target(parser)
    add_target_layers(parser)
    add_allow_zero_rows(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.passes.devices import peak_bytes
    from ...calibration.rounding import settings as learning
    from ...calibration.rounding.retune_draft import retune_draft
    from ...calibration.traces.trace_folder import TraceFolder

    source, draft = open_draft(options.draft)
    recipe = retuned_recipe(options.recipe)
    plan = make_plan(recipe, draft, target_layers=options.target_layers)
    traces = TraceFolder.open(options.traces)
    loaded, _, num_draft_tokens = draft_on_traces(source.folder, traces, options)
    with progress_bar("retune", 2 * learning.RETUNING.steps) as bar:
        report = retune_draft(
            plan,
            loaded,
            traces,
            options.out,
            options.baseline,
            source=source,
            num_draft_tokens=num_draft_tokens,
            settings=learning.RETUNING,
            allow_zero_rows=options.allow_zero_rows,
            argv=options.argv,
            on_progress=_Shown(bar),
        )
    note(f"memory: {peak_bytes(loaded.device) / 1e9:.2f} GB at its peak")
    if options.json:
        print_json(_mapping(report))
    else:
        _print(report)
    return 0


def retuned_recipe(reference: str) -> Recipe:
    """A recipe whose codes the target is to teach, from where it says that scales start."""
    recipe = named_recipe(reference)
    algorithm = dataclasses.replace(recipe.algorithm, rounding="retuned")
    if recipe.algorithm.rounding == "nearest":
        algorithm = dataclasses.replace(algorithm, scale="mse")
    return dataclasses.replace(recipe, algorithm=algorithm, backend="torch")


class _Shown:
    """Both sides in one bar, and a line for every look at the prompts that are held back."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def __call__(self, side: "Side", progress: "LearningProgress") -> None:
        done = progress.step if side == "baseline" else progress.steps + progress.step
        self._bar.set(done, 2 * progress.steps)
        found = progress.validation
        if found.step != progress.step:
            return
        note(
            f"{_name(side)}, step {progress.step} of {progress.steps}: loss {progress.loss:.4f}, on"
            f" prompts that are held back acceptance length {found.acceptance_length:.3f} (as"
            f" released {found.unquantized:.3f}), {found.overlap:.2%} overlap with the draft as"
            f" released; best so far: step {progress.best.step}"
        )


def _name(side: "Side") -> str:
    return "BF16 baseline" if side == "baseline" else "quantized"


def _print(report: "RetuneReport") -> None:
    out, quantized = stdout(), report.quantized
    kept = len(quantized.plan.steps) - len(quantized.plan.quantized) - len(quantized.balanced)
    out.line(
        (str(quantized.out), "bold"),
        (" RETUNED", "bold magenta"),
        f": {len(quantized.plan.quantized)} linears quantized and taught by the target, {kept}"
        f" tensors kept byte for byte, {megabytes(quantized.plan.bytes_before)} ->"
        f" {megabytes(quantized.plan.bytes_after)}, verified",
    )
    _print_learned(report.learned)
    made = "was there already and stays" if report.made_before else "written, verified"
    out.line(
        (str(report.baseline), "bold"),
        (" RETUNED", "bold magenta"),
        f": the BF16 draft taught alike, {made}",
    )
    _print_learned(report.baseline_learned)
    out.line(
        "What they accept more than the draft as released is training, not quantization:"
        f" draftquant gate BF16 {quantized.out} --tuned-baseline {report.baseline} --traces ..."
    )


def _print_learned(learned: "LearnedRounding") -> None:
    stdout().line(
        f"  step {learned.kept_step}: acceptance length {learned.acceptance_length:.3f} on"
        f" {learned.validation_prompts} prompts that were held back (before"
        f" {learned.acceptance_length_before:.3f}, as released"
        f" {learned.acceptance_length_unquantized:.3f}), {learned.overlap:.2%} overlap with the"
        " draft as released"
    )


def _mapping(report: "RetuneReport") -> dict[str, Any]:
    quantized = report.quantized
    return {
        "retuned": True,
        "out": str(quantized.out),
        "baseline": str(report.baseline),
        "baseline_made_before": report.made_before,
        "recipe": quantized.plan.recipe.name,
        "bytes_before": quantized.plan.bytes_before,
        "bytes_after": quantized.plan.bytes_after,
        "retuning": dataclasses.asdict(report.retuning),
        "learned": dataclasses.asdict(report.learned),
        "baseline_learned": dataclasses.asdict(report.baseline_learned),
        "verification": quantized.verification.to_mapping(),
    }
