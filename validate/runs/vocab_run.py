"""`vocab`, whole: writes rows of a head, or the curve of their value, with times on GPUs."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import chosen_num_draft_tokens, open_traces
from ...calibration.traces.held_out import seen_continuations, seen_prompts
from ...calibration.vocabulary.vocabulary_rows import (
    Choosing,
    RowsAsked,
    check_same_target,
    choosing_of,
    write_rows,
)
from ...quantize.asked import Estimating
from ...quantize.estimate.work import Machine
from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import write_reports
from ...quantize.files.staging import check_output
from ...quantize.gpus import named_gpu
from ...recipes.errors import EstimateError
from ...recipes.regular_file import optional_path
from ..comparison.size_curve import drawing, size_curve, usual_sizes
from ..comparison.size_estimate import (
    MachineSpeeds,
    ServingSpeeds,
    SizeEstimate,
    SizeSpeed,
    VocabReport,
    checked_concurrencies,
    parse_step_times,
    size_estimate,
)
from .vocab_asked import VocabRun

USUAL_GPU = "h200"
_UNQUANTIZED = (
    "bytes and times are estimated of unquantized drafts: give the one that this was made of"
)
_OF_A_CUT = ("size", "size_before", "head_from", "bytes_before", "bytes_after")


def vocabulary_as_asked(asked: VocabRun) -> VocabReport:
    """Choose the rows and write the folder, or give the curve, with warnings on the choice."""
    if asked.out is not None:
        check_output(Path(asked.out))
    listener, target = asked.listener, optional_path(asked.target)
    choosing = choosing_of(
        resolve_draft(str(asked.draft)),
        open_traces(asked.traces, listener),
        target=target,
        counts=optional_path(asked.counts),
    )
    if asked.out is None:
        report = _curve(choosing, asked)
        most = max(report.curve.sizes, default=0) if report.curve is not None else 0
        return replace(report, warnings=(*choosing.warnings_of(most), *report.warnings))
    wanted = RowsAsked(size=asked.size, coverage=asked.coverage, target=target)
    rows, out = wanted.of(choosing), Path(asked.out)
    cut = write_rows(choosing, rows, out, wanted, listener=listener, on_stage=listener.stage)
    warnings = choosing.warnings_of(len(rows.target_ids))
    return VocabReport(choosing=choosing, rows=rows, cut=cut, warnings=warnings)


def _curve(choosing: Choosing, asked: VocabRun) -> VocabReport:
    traces, judge, warnings = choosing.traces, None, tuple[str, ...]()
    sizes = _sizes(asked, choosing)
    serving = _serving(asked)
    if asked.judge is not None:
        judge = open_traces(asked.judge, asked.listener)
        check_same_target(traces, judge)
        made = [(seen_prompts(traces), "are among those that choose the rows")]
        made += [(cut.choice.prompts, "chose the rows that the draft has") for cut in choosing.cuts]
        if again := seen_continuations(judge, made):
            warnings = (
                f"the target's continuations of {len(again)} of the {len(judge)} prompts of"
                f" {judge.folder.name} are among those that choose the rows",
            )
    loaded = load_for_replay([choosing.source.folder], judge or traces, asked)
    with asked.listener.bar("replay", len(judge or traces), "work") as bar:
        curve = size_curve(
            loaded.drafts[0],
            choosing.chooser,
            traces,
            judge,
            sizes=sizes,
            num_draft_tokens=chosen_num_draft_tokens(asked.num_draft_tokens, loaded.drafts),
            batch_size=asked.batch_size,
            max_tokens=loaded.max_tokens,
            on_progress=bar.set,
        )
    if asked.plot is not None:
        write_reports({Path(asked.plot): drawing(curve, choosing.source.folder.name)})
    report = VocabReport(choosing=choosing, curve=curve, warnings=warnings)
    if choosing.is_quantized:
        return replace(report, warnings=(*warnings, _UNQUANTIZED))
    try:
        return replace(report, estimate=size_estimate(choosing.draft, curve, serving))
    except EstimateError as exc:
        what = f"bytes and times are not estimated: {exc.what}"
        return replace(report, warnings=(*warnings, what))


def _sizes(asked: VocabRun, choosing: Choosing) -> tuple[int, ...]:
    """As requested, in ascending order; or the usual ones that are cuts of this draft."""
    rows = choosing.chooser.num_rows
    usual = [size for size in usual_sizes(rows) if size >= choosing.least] or [rows // 2]
    sizes = tuple(sorted(set(asked.sizes or usual)))
    for size in sizes:
        choosing.check_size("--sizes", size)
    return sizes


def _serving(asked: VocabRun) -> ServingSpeeds:
    concurrencies = checked_concurrencies(asked.concurrency)
    names = dict.fromkeys(named_gpu(name).name for name in asked.gpus or (USUAL_GPU,))
    times = asked.target_step_ms
    return ServingSpeeds(
        machines=[Machine(gpu=named_gpu(name), efficiency=Estimating.efficiency) for name in names],
        concurrencies=concurrencies,
        step_seconds={} if times is None else parse_step_times(str(times), concurrencies),
    )


def to_mapping(report: VocabReport) -> dict[str, Any]:
    """Plain data for JSON."""
    choosing = report.choosing
    plain: dict[str, Any] = {
        "draft": str(choosing.source.folder),
        "traces": str(choosing.traces.folder),
        "traces_sha256": choosing.traces.sha256,
        "target": choosing.traces.manifest.target.name,
        "vocabulary": choosing.chooser.vocab_size,
        "num_rows": choosing.chooser.num_rows,
        "prompts": len(choosing.texts),
        "tokens": choosing.num_tokens,
        "distinct_tokens": choosing.num_distinct,
        "method": choosing.chooser.method,
        "warnings": list(report.warnings),
    }
    if report.rows is not None and report.cut is not None:
        rows = {**dataclasses.asdict(report.rows), "target_ids": list(report.rows.target_ids)}
        cut = {name: getattr(report.cut, name) for name in _OF_A_CUT}
        verified = report.cut.verification.to_mapping()
        plain |= {
            "rows": rows,
            "cut": {"out": str(report.cut.out), **cut, "verification": verified},
        }
    if report.curve is not None:
        plain["curve"] = dataclasses.asdict(report.curve)
        plain["estimate"] = None if report.estimate is None else _estimate_mapping(report.estimate)
    return plain


def _estimate_mapping(estimate: SizeEstimate) -> dict[str, Any]:
    def of(speeds: tuple[MachineSpeeds, ...]) -> list[dict[str, Any]]:
        return [
            {
                "gpu": machine.gpu,
                "concurrency": machine.concurrency,
                "sizes": [_speed_mapping(speed) for speed in machine.speeds],
                "recommended": None if machine.recommended is None else machine.recommended.size,
                "recommended_within_bounds": list(machine.range),
            }
            for machine in speeds
        ]

    return {
        "drafting_bytes": {str(size): nbytes for size, nbytes in estimate.drafting_bytes.items()},
        "head_bytes": {str(size): nbytes for size, nbytes in estimate.head_bytes.items()},
        "context": estimate.context,
        "chosen": of(estimate.speeds),
        "off_domain": of(estimate.off_domain),
    }


def _speed_mapping(speed: SizeSpeed) -> dict[str, Any]:
    """JSON has no infinity: a size that always pays says so in words."""
    mapping = dataclasses.asdict(speed)
    always = speed.pays_below is not None and math.isinf(speed.pays_below)
    return mapping | {"pays_below": None if always else speed.pays_below, "always_pays": always}
