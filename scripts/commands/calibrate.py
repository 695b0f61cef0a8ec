"""`draftquant calibrate`: ranges of what linears read, and what static scales are worth."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.files.hub import resolve_draft
from ...quantize.files.staging import check_output
from ..console import print_json, print_table, progress_bar, stdout, table
from .common import (
    add_device,
    add_num_draft_tokens,
    add_target,
    draft_on_traces,
)

if TYPE_CHECKING:
    from ...calibration.linear_inputs.chain_ranges import Ranges
    from ...calibration.linear_inputs.static_error import StaticError
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.counting.activation_scales import ScaleComparison

SHARES = (0.5, 0.99, 0.9999)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`calibrate DRAFT --traces TRACES...`."""
    parser.add_argument("draft", metavar="DRAFT", help="folder or Hub id, BF16")
    parser.add_argument(
        "--traces",
        required=True,
        nargs="+",
        type=Path,
        metavar="TRACES",
        help="trace folders for calibration: what they show is added up",
    )
    add_num_draft_tokens(parser)
    add_target(parser)
    add_device(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the ranges: FILE.svg, .png or .pdf"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="replay the first TRACES with inputs rounded under several scales, and under the same"
        " scale moved a little: what is less than that spread is no gain",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.linear_inputs.chain_ranges import measure_ranges, merged
    from ...calibration.linear_inputs.range_plot import draw_ranges
    from ...calibration.linear_inputs.static_error import static_errors
    from ...calibration.plot_file import check_plot_path
    from ...calibration.traces.trace_folder import TraceFolder

    if options.plot:
        check_output(options.plot)
        check_plot_path(options.plot)
    folders = [TraceFolder.open(folder) for folder in options.traces]
    folder = resolve_draft(options.draft).folder
    draft, _, num_draft_tokens = draft_on_traces(folder, folders[0], options)
    measured = []
    for traces in folders:
        with progress_bar("calibrate", len(traces)) as bar:
            ranges = measure_ranges(
                draft, traces, num_draft_tokens=num_draft_tokens, on_progress=bar.set
            )
        measured.append(ranges)
    ranges = merged(measured)
    errors = static_errors(ranges)
    comparison = None
    if options.compare:
        comparison = _compared(draft, folders[0], errors, num_draft_tokens)
    if options.plot:
        title = f"{draft.name}: inputs of {len(draft.linears)} linears, K = {num_draft_tokens}"
        draw_ranges(ranges, options.plot, title)
    if options.json:
        print_json(_mapping(ranges, errors, comparison))
        return 0
    _print_ranges(ranges)
    _print_errors(errors)
    if comparison:
        _print_comparison(comparison)
    if options.plot:
        stdout().line((str(options.plot), "bold"), ": ranges by linear and step")
    return 0


def _compared(
    draft: "LoadedDraft",
    traces: "TraceFolder",
    errors: "Mapping[str, StaticError]",
    num_draft_tokens: int,
) -> "ScaleComparison":
    from ...validate.counting.activation_scales import compare_scales

    scales = {module: one.stored for module, one in errors.items()}
    with progress_bar("compare", len(traces)) as bar:
        return compare_scales(
            draft, traces, scales, num_draft_tokens=num_draft_tokens, on_progress=bar.set
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
        "Static FP8 scales: the stored one, the best of 64, and the constant 1.0; errors are"
        " shares of the inputs' energy",
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
            f"calibration matters: the constant 1.0 does not serve {len(needing)} of {len(errors)}"
            f" linears, first {needing[0]}"
        )
    else:
        stdout().line(
            "calibration gains nothing: no input comes near 448 and none that matters lies below"
            " 2^-6, so the constant 1.0 (quantize --input-scale 1) rounds as well as any scale"
        )


def _opinion(one: "StaticError") -> str:
    if one.one_is_enough:
        return "enough"
    return "too small" if one.clipped else "too large"


def _print_comparison(comparison: "ScaleComparison") -> None:
    found = table(
        f"Activations alone rounded; acceptance length {comparison.unrounded:.4f} unrounded",
        "scales",
        "change",
        right=("change",),
    )
    found.row("one per token", f"{comparison.per_token:+.2%}")
    found.row("measured", f"{comparison.measured:+.2%}")
    for i, change in enumerate(comparison.alignments):
        found.row(f"constant {2 ** (i / len(comparison.alignments)):.3f}", f"{change:+.2%}")
    print_table(found)
    verdict = "is within" if comparison.gains_nothing else "is more than"
    stdout().line(
        f"measured scales against 1.0: {comparison.gain:+.2%}, which {verdict} chance: a constant"
        f" moved by less than an octave spreads by {comparison.spread:.2%} (standard deviation)"
    )


def _mapping(
    ranges: "Ranges",
    errors: "Mapping[str, StaticError]",
    comparison: "ScaleComparison | None",
) -> dict[str, Any]:
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
            for key, one in ranges.items()
        ],
        "static_scales": {
            module: dataclasses.asdict(one) | {"one_is_enough": one.one_is_enough}
            for module, one in errors.items()
        },
        "comparison": None
        if comparison is None
        else dataclasses.asdict(comparison)
        | {"spread": comparison.spread, "gains_nothing": comparison.gains_nothing},
    }
