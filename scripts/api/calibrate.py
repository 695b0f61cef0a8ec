"""`calibrate`: ranges of what a draft's linears read, and what static scales are worth."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...calibration.errors import CalibrationError
from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import write_reports
from ...quantize.files.staging import check_output
from ...recipes.brief import Brief
from .arguments import AnyPath, Device, NumDraftTokens, Target
from .listener import Listener
from .opened_traces import open_traces
from .opening import draft_on_traces
from .option import Argument, Option
from .references import Reference, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...calibration.linear_inputs.chain_ranges import Ranges
    from ...calibration.linear_inputs.static_error import StaticError
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.confidence.shared_scaling import SharedScaling
    from ...validate.confidence.temperatures import Temperatures
    from ...validate.counting.activation_scales import ScaleComparison


@dataclass(frozen=True, slots=True)
class CalibrateSettings(Settings):
    """Of which draft, along which traces, and what is found out besides."""

    draft: Annotated[Reference, Argument("BF16 draft: a folder or a Hub id (owner/name)", "DRAFT")]
    traces: Annotated[
        Sequence[AnyPath],
        Option("trace folders to calibrate on; their ranges are merged", "TRACES"),
    ]
    _: KW_ONLY
    num_draft_tokens: NumDraftTokens = None
    target: Target = None
    device: Device = "auto"
    plot: Annotated[
        AnyPath | None, Option("draw the ranges into this file (.svg, .png or .pdf)", "FILE")
    ] = None
    sts: Annotated[
        AnyPath | None,
        Option(
            "fit temperatures of DSpark's confidence head on TRACES, write them into this file,"
            " which SGLang reads, and measure nothing else; DRAFT may be quantized",
            "FILE",
        ),
    ] = None
    compare: Annotated[
        bool,
        Option(
            "replay the first TRACES with inputs rounded under several scales, and "
            "under slightly shifted ones; a difference smaller than that spread is "
            "noise"
        ),
    ] = False

    @override
    def check(self) -> None:
        if self.sts is not None and (self.compare or self.plot is not None):
            raise CalibrationError(
                "--sts",
                "fits the confidence head alone, so that there is nothing to compare or to draw",
                fix="leave --compare and --plot out, or run calibrate twice",
            )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CalibrateReport(Brief):
    """The inputs of a draft's linears, and what FP8 makes of them.

    Attributes:
        ranges: the inputs of every linear, for each draft step.
        errors: the error of each linear's inputs under static scales.
        comparison: what scales are worth in accepted tokens; None where it was not asked for.
        temperatures: of the confidence head; None where they were not asked for. With them, there
            are no ranges and no errors.
        scaling: what the head itself would need, for an engine that reads no temperatures.
    """

    ranges: "Ranges"
    errors: "Mapping[str, StaticError]"
    comparison: "ScaleComparison | None"
    temperatures: "Temperatures | None" = None
    scaling: "SharedScaling | None" = None

    @override
    def brief(self) -> Mapping[str, object]:
        if self.temperatures is not None:
            return {"temperatures": f"{len(self.temperatures.temperatures)} temperatures"}
        return {
            "linears": f"{len(self.errors)} linears",
            "scales compared": "by acceptance" if self.comparison is not None else None,
        }


@verb(CalibrateSettings)
def calibrate(settings: CalibrateSettings) -> CalibrateReport:
    """Measure the inputs (activations) of a draft's linears along traces.

    With `compare=True` the draft is also replayed with inputs rounded under several static scales,
    so that you see what a scale is worth in accepted tokens. With `sts=FILE` nothing of this is
    measured: temperatures of the confidence head are fitted and written.

    Returns:
        The range of each linear's inputs, the error that each static scale makes, and the
        comparison of scales where it was asked for; or the temperatures.

    Raises:
        DraftQuantError: the draft or the traces cannot be read, or do not belong together.
    """
    from ...calibration.linear_inputs.chain_ranges import measure_ranges, merged
    from ...calibration.linear_inputs.range_plot import draw_ranges
    from ...calibration.linear_inputs.static_error import static_errors
    from ...calibration.plot_file import check_plot_path
    from ...validate.counting.activation_scales import compare_scales

    plot, listener = optional_path(settings.plot), settings.listener
    if settings.sts is not None:
        check_output(Path(settings.sts))
    if plot:
        check_output(plot)
        check_plot_path(plot)
    folders = [open_traces(folder, settings.listener) for folder in settings.traces]
    draft, _, num_draft_tokens = draft_on_traces(
        resolve_draft(str(settings.draft)).folder,
        folders[0],
        device=settings.device,
        target=optional_path(settings.target),
        num_draft_tokens=settings.num_draft_tokens,
    )
    if settings.sts is not None:
        return _fitted(draft, folders, num_draft_tokens, Path(settings.sts), listener)
    measured = []
    for traces in folders:
        with listener.bar("calibrate", len(traces), "work") as bar:
            ranges = measure_ranges(
                draft, traces, num_draft_tokens=num_draft_tokens, on_progress=bar.set
            )
        measured.append(ranges)
    ranges = merged(measured)
    errors = static_errors(ranges)
    comparison = None
    if settings.compare:
        scales = {module: one.stored for module, one in errors.items()}
        with listener.bar("compare", len(folders[0]), "work") as bar:
            comparison = compare_scales(
                draft, folders[0], scales, num_draft_tokens=num_draft_tokens, on_progress=bar.set
            )
    if plot:
        title = f"{draft.name}: inputs of {len(draft.linears)} linears, K = {num_draft_tokens}"
        draw_ranges(ranges, plot, title)
    return CalibrateReport(ranges=ranges, errors=errors, comparison=comparison)


def _fitted(
    draft: "LoadedDraft",
    folders: "Sequence[TraceFolder]",
    num_draft_tokens: int,
    out: Path,
    listener: Listener,
) -> CalibrateReport:
    """Fit temperatures on all traces together, and write them."""
    import torch

    from ...calibration.traces.recorded_prompts import seen_prompts
    from ...validate.confidence.shared_scaling import shared_scaling
    from ...validate.confidence.temperatures import fitted
    from ...validate.counting.confidence_answers import confidence_samples

    found = []
    for traces in folders:
        with listener.bar("confidence", len(traces), "work") as bar:
            found.append(
                confidence_samples(
                    draft, traces, num_draft_tokens=num_draft_tokens, on_progress=bar.set
                )
            )
    logits, accepted = (torch.cat(one) for one in zip(*found, strict=True))
    names = ", ".join(f"{one.manifest.target.name} traces {one.sha256[:12]}" for one in folders)
    dataset = f"draftquant: {draft.name} on {names}"
    temperatures = fitted(logits, accepted, dataset, [seen_prompts(one) for one in folders])
    write_reports({out: temperatures.text()}, overwrite=False)
    return CalibrateReport(
        ranges={},
        errors={},
        comparison=None,
        temperatures=temperatures,
        scaling=shared_scaling(logits, accepted),
    )
