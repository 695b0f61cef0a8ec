"""`graft`: put an MTP layer that was quantized apart back into its target's folder."""

from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.hub import Reference, resolve_draft, running_argv
from ...recipes.listener import Heard, verifying
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.console import megabytes, stdout
from ..frame.verb import Command, verb


@dataclass(frozen=True)
class GraftSettings(Heard):
    """Which target, which layer, into which folder, and how the target's files get there."""

    target: AnyPath
    layer: Reference
    out: AnyPath
    _: KW_ONLY
    subtree: str | None = None
    replace: bool = False
    link: Literal["hard", "symbolic", "none"] = "hard"


@verb(GraftSettings)
def graft(settings: GraftSettings) -> "reports.GraftReport":
    """Put an MTP layer into its target's folder; the target's own files are linked, not rewritten.

    Example:
        >>> report = dq.graft("TARGET", "LAYER", "OUT")
        >>> report.layers, report.target_tensors
        (('model.layers.46',), 20912)

    Returns:
        What was written, and what engines are predicted to do with it.

    Raises:
        CheckpointError: the layer is that of another target, or the target has it already.
        LayoutError: no declaration makes an engine read target and layer each as it is stored.
        DraftQuantError: of another stage; nothing is left behind.
    """
    from ...quantize.grafting.graft_layer import graft_layer, plan_graft

    source = resolve_draft(str(settings.layer), settings.subtree)
    plan = plan_graft(Path(settings.target), source, replace=settings.replace)
    with settings.listener.bar("graft", plan.written_bytes, "bytes") as bar:
        return graft_layer(
            plan,
            Path(settings.out),
            link=settings.link,
            argv=running_argv(),
            on_progress=bar.advance,
            on_stage=verifying(bar),
        )


def _show(report: "reports.GraftReport", _settings: object) -> None:
    out = stdout()
    out.line(
        (str(report.out), "bold"),
        f": {', '.join(report.layers)}, {report.scheme or 'not quantized'}, in the target:"
        f" {report.layer_tensors} tensors of the layer, {megabytes(report.bytes_written)} written;"
        f" all {report.target_tensors} tensors of the target unchanged, verified",
    )
    for way, count in Counter(report.linked.values()).items():
        out.line(f"{count} file(s) of the target: {way}")
    if report.rewritten:
        out.line(
            f"{len(report.rewritten)} file(s) written again without the {report.replaced} tensors"
            " that were replaced"
        )
    if report.left_out:
        out.line(f"left out, as they are the target's: {', '.join(report.left_out)}")
    for check in report.checks:
        out.line((f"{check.verdict}", "bold"), f": {check.title} on {check.gpu}")
        if check.error:
            out.line(f"  {check.error}")


COMMAND = Command(graft, _show)
