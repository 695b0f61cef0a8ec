"""`graft`: put an MTP layer that was quantized apart back into its target's folder."""

import dataclasses
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ...quantize.files.hub import Reference, resolve_draft, running_argv
from ...recipes.listener import verifying
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.arguments import OutFolder
from ..frame.console import megabytes, stdout
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import Command, verb


@dataclass(frozen=True, slots=True)
class GraftSettings(Settings):
    """Of which target, which layer, into which folder, and how the target's files come there."""

    target: Annotated[AnyPath, Argument("folder of the target, which is only read", "TARGET")]
    layer: Annotated[
        Reference,
        Argument("folder of the MTP layer, or with --subtree of a model that has it", "LAYER"),
    ]
    out: OutFolder
    _: KW_ONLY
    subtree: Annotated[
        str | None,
        Option(
            "LAYER is a whole model's folder, and the MTP layer with this prefix is taken out of"
            " it (model.layers.61, model.mtp_layers.0, mtp); list several layers with commas",
            "PREFIX[,PREFIX...]",
        ),
    ] = None
    replace: Annotated[
        bool,
        Option(
            "TARGET has this layer already: leave it out, and write the files that hold a part of"
            " it again without it"
        ),
    ] = False
    link: Annotated[
        Literal["hard", "symbolic", "none"],
        Option(
            "how the target's unchanged files come into the folder: hard links (default; copies"
            " where the disk has none), symbolic links, or none: copies"
        ),
    ] = "hard"


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
    from ...quantize.grafting.graft_layer import graft_layer
    from ...quantize.grafting.graft_plan import plan_graft

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


def _mapping(report: "reports.GraftReport", _settings: object) -> dict[str, Any]:
    fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
    checks = [dataclasses.asdict(check) for check in report.checks]
    return {**fields, "out": str(report.out), "checks": checks}


COMMAND = Command(graft, _show, _mapping)
