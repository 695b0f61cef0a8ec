"""`draftquant retune`: fine-tune a quantized draft on its target, and a BF16 control."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..api.retune import retune
from ..console import megabytes, print_json, stdout

if TYPE_CHECKING:
    from ...quantize.files.how_rounded import LearnedRounding
    from ..api.reports import RetuneReport

VERB = retune


def run(options: argparse.Namespace) -> int:
    """Retune, and print what was written and how both sides learned."""
    report = retune.run(options.settings)
    if options.json:
        print_json(_mapping(report))
    else:
        _print(report)
    return 0


def _print(report: "RetuneReport") -> None:
    out, quantized = stdout(), report.quantized
    kept = len(quantized.plan.steps) - len(quantized.plan.quantized) - len(quantized.balanced)
    out.line(
        (str(quantized.out), "bold"),
        (" RETUNED", "bold magenta"),
        f": {len(quantized.plan.quantized)} linears quantized and fine-tuned on the target, {kept}"
        f" tensors kept byte for byte, {megabytes(quantized.plan.bytes_before)} ->"
        f" {megabytes(quantized.plan.bytes_after)}, verified",
    )
    _print_learned(report.learned)
    made = "which existed already and is kept" if report.made_before else "written, verified"
    out.line(
        (str(report.baseline), "bold"),
        (" RETUNED", "bold magenta"),
        f": the BF16 draft fine-tuned identically (control), {made}",
    )
    _print_learned(report.baseline_learned)
    out.line(
        "Both may accept more than the released draft: that is training, not quantization. Judge"
        f" the quantized draft with: draftquant gate BF16 {quantized.out} --tuned-baseline"
        f" {report.baseline} --traces ..."
    )


def _print_learned(learned: "LearnedRounding") -> None:
    stdout().line(
        f"  step {learned.kept_step}: acceptance length {learned.acceptance_length:.3f} on"
        f" {learned.validation_prompts} prompts held back (before"
        f" {learned.acceptance_length_before:.3f}, released draft"
        f" {learned.acceptance_length_unquantized:.3f}), {learned.overlap:.2%} overlap with the"
        " released draft"
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
