"""`draftquant calibrate`: ranges of what linears read, and what static scales are worth."""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..api.calibrate import CalibrateReport, calibrate
from ..console import print_json, print_table, stdout, table

if TYPE_CHECKING:
    from ...calibration.linear_inputs.chain_ranges import Ranges
    from ...calibration.linear_inputs.static_error import StaticError
    from ...validate.confidence.shared_scaling import SharedScaling
    from ...validate.confidence.temperatures import Temperatures
    from ...validate.counting.activation_scales import ScaleComparison

VERB = calibrate
_SGLANG = "--speculative-dspark-confidence-sts-path"
SHARES = (0.5, 0.99, 0.9999)


def run(options: argparse.Namespace) -> int:
    """Calibrate, and print ranges, errors and what scales are worth."""
    report, plot = calibrate.run(options.settings), options.settings.plot
    if options.json:
        print_json(_mapping(report))
        return 0
    if report.temperatures is not None and report.scaling is not None:
        _print_temperatures(report.temperatures)
        _print_scaling(report.scaling)
        stdout().line((str(options.settings.sts), "bold"), ": for SGLang's", f" {_SGLANG}")
        return 0
    _print_ranges(report.ranges)
    _print_errors(report.errors)
    if report.comparison:
        _print_comparison(report.comparison)
    if plot:
        stdout().line((str(plot), "bold"), ": the ranges by linear and draft step")
    return 0


def _print_temperatures(found: "Temperatures") -> None:
    numbers = ("position", "temperature", "calibration error at 1", "with it")
    rows = table(
        f"Temperatures of the confidence head, fitted on {found.num_samples:,} verify steps",
        *numbers,
        right=numbers,
    )
    columns = zip(found.temperatures, found.ece_before, found.ece_after, strict=True)
    for i, (temperature, before, after) in enumerate(columns):
        rows.row(str(i + 1), f"{temperature:.4f}", f"{before:.4f}", f"{after:.4f}")
    print_table(rows)


def _print_scaling(found: "SharedScaling") -> None:
    before, after = (sum(errors) / len(errors) for errors in (found.ece_before, found.ece_after))
    stdout().line(
        f"one scale and one shift for all positions: logits * {found.scale:.4f} {found.shift:+.4f}"
        f" bring the calibration error from {before:.4f} to {after:.4f} on these steps; an engine"
        " that reads no temperatures (vLLM) reads them in confidence_head.proj: weight * scale,"
        " bias * scale + shift"
    )


def _print_ranges(ranges: "Ranges") -> None:
    numbers = ("step", *(f"{100 * share:g} % below" for share in SHARES), "largest", "rms")
    found = table("Inputs of linears, before rounding", "linear", "part", *numbers, right=numbers)
    for key, one in ranges.items():
        found.row(
            key.module,
            key.half,
            str(key.step),
            *(f"{one.percentile(share):.4g}" for share in SHARES),
            f"{one.absmax:.4g}",
            f"{one.rms:.4g}",
        )
    print_table(found)


def _print_errors(errors: "Mapping[str, StaticError]") -> None:
    numbers = ("largest", "stored", "error", "best", "error there", "error at 1.0")
    found = table(
        "Static FP8 scales: the stored one, the best of 64, and the constant 1.0. Errors are"
        " relative to the inputs' energy",
        "linear",
        *numbers,
        "1.0 is",
        right=numbers,
    )
    for module, one in errors.items():
        found.row(
            module,
            f"{one.absmax:.4g}",
            f"{one.stored:.4g}",
            f"{one.stored_error:.2e}",
            f"{one.best:.4g}",
            f"{one.best_error:.2e}",
            f"{one.one_error:.2e}",
            _opinion(one),
        )
    print_table(found)
    needing = [module for module, one in errors.items() if not one.one_is_enough]
    if needing:
        stdout().line(
            f"calibration matters: the constant scale 1.0 is too coarse for {len(needing)} of"
            f" {len(errors)} linears, such as {needing[0]}"
        )
    else:
        stdout().line(
            "calibration gains nothing: inputs stay below 448, and those that matter above 2^-6, so"
            " the constant scale 1.0 (quantize --input-scale 1) is as accurate as any other"
        )


def _opinion(one: "StaticError") -> str:
    if one.one_is_enough:
        return "enough"
    return "too small" if one.clipped else "too large"


def _print_comparison(comparison: "ScaleComparison") -> None:
    found = table(
        f"Rounded activations only; without rounding the acceptance length is"
        f" {comparison.unrounded:.4f}",
        "scales",
        "change",
        right=("change",),
    )
    found.row("one per token", f"{comparison.per_token:+.2%}")
    found.row("measured", f"{comparison.measured:+.2%}")
    for i, change in enumerate(comparison.alignments):
        found.row(f"constant {2 ** (i / len(comparison.alignments)):.3f}", f"{change:+.2%}")
    print_table(found)
    verdict = "within" if comparison.gains_nothing else "more than"
    stdout().line(
        f"measured scales against the constant 1.0: {comparison.gain:+.2%}, which is {verdict}"
        f" chance: constants within an octave of it differ by {comparison.spread:.2%} (standard"
        " deviation)"
    )


def _mapping(report: CalibrateReport) -> dict[str, Any]:
    comparison = report.comparison
    if report.temperatures is not None:
        parts = {"temperatures": report.temperatures, "scaling": report.scaling}
        return {name: dataclasses.asdict(part) for name, part in parts.items() if part}
    return {
        "ranges": [
            {
                "linear": key.module,
                "step": key.step,
                "part": key.half,
                "percentiles": {str(share): one.percentile(share) for share in SHARES},
                "absmax": one.absmax,
                "rms": one.rms,
                "count": one.count,
            }
            for key, one in report.ranges.items()
        ],
        "static_scales": {
            module: dataclasses.asdict(one) | {"one_is_enough": one.one_is_enough}
            for module, one in report.errors.items()
        },
        "comparison": None
        if comparison is None
        else dataclasses.asdict(comparison)
        | {"spread": comparison.spread, "gains_nothing": comparison.gains_nothing},
    }
