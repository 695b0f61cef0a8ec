"""`transcode`: the same codes and scales in another layout or carrier, bit for bit."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.hub import Reference, resolve_draft, running_argv
from ...recipes.listener import Heard, verifying
from ...recipes.regular_file import AnyPath
from ...recipes.schema import LayoutName
from ..frame import reports
from ..frame.console import megabytes, stdout
from ..frame.verb import Command, verb


@dataclass(frozen=True)
class TranscodeSettings(Heard):
    """Which folder, into which folder, and how its codes are stored there."""

    quantized: Reference
    out: AnyPath
    _: KW_ONLY
    layout: LayoutName | None = None
    carrier: Literal["fp8_e4m3", "nvfp4", "none"] | None = None
    target_layers: int | None = None


@verb(TranscodeSettings)
def transcode(settings: TranscodeSettings) -> "reports.TranscodeReport":
    """Store a quantized draft in another layout, or its values in another dtype, bit for bit.

    Returns:
        What was written.

    Raises:
        DraftQuantError: the layout cannot hold the quantized values; nothing is left behind.
    """
    from ...quantize.making.transcode_draft import plan_transcoding, transcode_draft

    plan = plan_transcoding(
        resolve_draft(str(settings.quantized)),
        settings.layout,
        settings.carrier,
        target_layers=settings.target_layers,
    )
    with settings.listener.bar("transcode", plan.bytes_after, "bytes") as bar:
        return transcode_draft(
            plan,
            Path(settings.out),
            argv=running_argv(),
            on_progress=bar.advance,
            on_stage=verifying(bar),
        )


def _show(report: "reports.TranscodeReport", _settings: object) -> None:
    out = stdout()
    out.line(
        (str(report.out), "bold"),
        f": {report.linears} linears with the same quantized values and scales,"
        f" {report.kept} tensors kept"
        f" byte for byte, {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)},"
        " verified",
    )
    out.line(report.before)
    out.line(f"-> {report.after}")


COMMAND = Command(transcode, _show)
