"""`reconcile`: what a server accepted against what replay says of the same prompts."""

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import check_reports, write_reports
from ...recipes.bounds import AT_LEAST_1
from . import reports
from .arguments import AnyPath, Device, Overwrite, Target
from .opened_traces import open_traces
from .opening import shared_tables
from .option import Argument, Option
from .pages import given
from .references import Reference, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft


@dataclass(frozen=True, slots=True)
class ReconcileSettings(Settings):
    """Which measurement along which traces, by which draft."""

    traces: Annotated[AnyPath, Argument("traces recorded from the target", "TRACES")]
    measured: Annotated[AnyPath, Argument("measurement, written by 'measure'", "MEASUREMENT")]
    draft: Annotated[Reference, Option("the draft that was served", "DRAFT")]
    _: KW_ONLY
    target: Target = None
    device: Device = "auto"
    max_gap: Annotated[
        float | None,
        Option(
            "largest gap in nats between two tokens of the target at which either may"
            " be emitted (default 0.5: four BF16 steps of a logit in [16, 32))",
            "NATS",
        ),
    ] = None
    limit: Annotated[
        int | None,
        Option(
            "use only the first so many prompts that measurement and traces share (default: all)",
            "PROMPTS",
            bounds=AT_LEAST_1,
            fix="leave it out for all prompts",
        ),
    ] = None
    report: Annotated[
        AnyPath | None,
        Option(
            "also write the report as JSON; a killed run resumes from files beside it",
            "F.json",
        ),
    ] = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """The report can be written, and a gap is one."""
        from ...validate.errors import MeasureError

        check_reports(given({"report": self.report}), overwrite=self.overwrite)
        if self.max_gap is not None and not self.max_gap >= 0:
            raise MeasureError("--max-gap", f"expected nats of at least 0, got {self.max_gap}",
                               fix="leave it out")  # fmt: skip


@verb(ReconcileSettings)
def reconcile(settings: ReconcileSettings) -> "reports.Reconciliation":
    """Compare what a server accepted with what replay says of the same prompts.

    Returns:
        Every difference, and its explanation where there is one.

    Raises:
        DraftQuantError: the measurement, the traces and the draft do not fit each other, or do not
            fit in memory.
    """
    from ...calibration.passes.devices import resolve_device
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.divergence_findings import LARGEST_NOISE
    from ...validate.served import reconciliation
    from ...validate.served.reconciling_folder import kept_places

    measured, report = Path(settings.measured), optional_path(settings.report)
    measurement = read_measurement(measured)
    traces = open_traces(settings.traces, settings.listener)
    speculation = reconciliation.check_reconcilable(measurement, traces)
    folder = resolve_draft(str(settings.draft)).folder
    served, draft = speculation.draft_sha256, DraftFolder.read(folder)
    device = resolve_device(settings.device)
    tables = shared_tables(traces, optional_path(settings.target), device)
    drafts = _in_both_dtypes(folder, traces, tables, device)
    with (
        kept_places(report, measured, traces, draft.sha256) as kept,
        settings.listener.bar("reconcile", len(measurement.records), "work") as bar,
    ):
        found = reconciliation.reconcile(
            measurement,
            traces,
            drafts,
            tables=tables,
            max_gap=LARGEST_NOISE if settings.max_gap is None else settings.max_gap,
            other_draft=None if served is None else not draft.is_identity(served),
            limit=settings.limit,
            kept=kept,
            on_progress=bar.set,
        )
    if report is not None:
        text = json.dumps(found.to_mapping(), indent=2) + "\n"
        write_reports({report: text}, overwrite=settings.overwrite)
    if kept is not None:
        kept.remove()
    return found


def _in_both_dtypes(
    folder: Path, traces: "TraceFolder", tables: "SharedTables", device: "torch.device"
) -> "tuple[LoadedDraft, LoadedDraft]":
    """As engines compute, and exactly.

    Raises:
        DeviceError: too little memory.
        CheckpointError, VerifyError: see `load_draft`.
    """
    import torch

    from ...calibration.passes.memory import estimate_replay
    from ...quantize.stored.loading import load_draft

    estimate_replay(
        [folder, folder],
        traces,
        dtype=torch.float32,
        device=device,
        num_draft_tokens=None,
        batch_size=None,
    ).check()
    as_served, exact = (
        load_draft(folder, dtype=dtype, device=device, compact=True, shared=tables)
        for dtype in (torch.bfloat16, torch.float32)
    )
    return as_served, exact
