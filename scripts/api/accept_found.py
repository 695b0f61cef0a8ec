"""What the outputs of an acceptance's steps say; each is read again, whoever wrote it."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.engines.contract import TITLES, EngineName, loading_places
from ...recipes.brief import counted
from ...validate.judging.verdict import worst
from .engine_verdicts import verdict_lines

if TYPE_CHECKING:
    from ...quantize.engines.contract import EngineCheck
    from ...quantize.pairing import PairCheck, PairFinding
    from ...validate.acceptance.acceptance import StepFound
    from .verify import Verification

_SHOWN = 5
"""Faults of a verification, of which its file has all."""


def checked(answers: "Sequence[EngineCheck]", pair: "PairCheck", output: str) -> "StepFound":
    """It passes if one engine of those that were asked loads it on one GPU, beside this target.

    Args:
        answers: of engines, about the draft alone, on each GPU.
        pair: what the same engines make of the draft and its target.
        output: where all of it stands.
    """
    from ...validate.acceptance.acceptance import StepFound

    fitting = [one for one in answers if not _misfits(pair, one.engine)]
    told = partial(
        StepFound, name="check", output=output, details=(*verdict_lines(answers), *_said(pair))
    )
    if where := loading_places(fitting):
        return told(outcome="PASS", said=f"It loads beside this target in {where}.")
    if not answers:
        said = "It is not known what any engine does on this GPU."
        return told(outcome="INCONCLUSIVE", said=said, action="Start a server with it.")
    if loaded := [one for one in answers if one.verdict == "LOADS"]:
        first = _misfits(pair, loaded[0].engine)[0]
        said = f"Draft and target do not fit: {first.text}."
        return told(outcome="FAIL", said=said, action=f"{first.remedy}." if first.remedy else None)
    unknown = [one for one in fitting if one.verdict == "UNKNOWN"]
    decisive = (unknown or answers)[0]
    return told(
        outcome="INCONCLUSIVE" if unknown else "FAIL",
        said=f"No engine that was asked is known to load it. {decisive.title}: {decisive.error}.",
        action=decisive.remedy,
    )


def _misfits(pair: "PairCheck", engine: "EngineName") -> "list[PairFinding]":
    """What makes the engine refuse the pair, or serve it wrongly."""
    return [one for one in pair.of(engine).findings if one.level in ("refused", "wrong")]


def _said(pair: "PairCheck") -> "Iterator[str]":
    """What there is to know of the pair, and how it is served."""
    for finding in pair.findings:
        if finding.level != "note":
            who = "every engine" if finding.engine is None else TITLES[finding.engine]
            remedy = f" ({finding.remedy})" if finding.remedy else ""
            yield f"{finding.level}, {who}: {finding.text}{remedy}"
    yield from (f"not compared: {text}" for text in pair.not_compared)
    for each in pair.engines:
        if each.launch is not None and each.verdict in ("LOADS", "UNKNOWN"):
            yield f"{each.answer.title}: {each.launch}"


def verified(report: "Verification", output: str) -> "StepFound":
    """It passes if every byte is right."""
    from ...validate.acceptance.acceptance import StepFound

    faults = report.faults
    if report.ok:
        said = "Every tensor of it is that of DRAFT, kept or quantized as it declares."
        return StepFound(name="verify", outcome="PASS", said=said, output=output)
    return StepFound(
        name="verify",
        outcome="FAIL",
        said=f"{counted(len(faults), 'fault')}: {faults[0]}",
        output=output,
        details=faults[1:_SHOWN],
        action="Quantize the draft again, or give the draft that it was made from.",
    )


def recorded(path: Path) -> "StepFound":
    """How much was recorded."""
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.acceptance.acceptance import StepFound

    traces = TraceFolder.open(path)
    said = f"{len(traces):,} prompts, {traces.manifest.num_tokens:,} tokens."
    return StepFound(name="record", outcome="DONE", said=said, output=path.name)


def traces_sha256(path: Path) -> str:
    """Identity of what was recorded; its shards are held against it when they are read."""
    from ...calibration.traces.trace_folder import TraceFolder

    return TraceFolder.open(path).sha256


def measured(name: str, path: Path) -> "StepFound":
    """What a server accepted."""
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.measure.summary import all_figures, tokens_per_second

    found = read_measurement(path)
    whole, speed = all_figures(found)[0], tokens_per_second(found)
    said = (
        f"{found.setup.server.engine} {found.setup.server.version}, {whole.num_requests:,} prompts"
    )
    if whole.acceptance_length is not None:
        said += f", acceptance length {whole.acceptance_length:.4f}"
    if speed is not None:
        said += f", {speed:,.1f} tokens/s"
    return StepFound(name=name, outcome="DONE", said=f"{said}.", output=path.name)


def gated(path: Path) -> "StepFound":
    """The gate's verdict."""
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.report.document import read_report

    found = read_report(path).judgement
    return StepFound(
        name="gate",
        outcome=found.verdict,
        said=found.reason,
        output=path.name,
        action=found.action,
    )


def compared(name: str, path: Path) -> "StepFound":
    """The worst verdict of those figures of parity that have a limit."""
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.parity.finding import read_findings

    findings = read_findings(path)
    judged = [one for one in findings if one.threshold is not None]
    if not judged:
        first = findings[0]
        figures = counted(len(findings), "figure")
        said = f"{figures} without a limit; {first.what} {first.estimate:.4g}."
        return StepFound(name=name, outcome="DONE", said=said, output=path.name)
    verdict = worst(one.verdict for one in judged)
    told = [f"{one.what}: {one.reason}" for one in judged if one.verdict == verdict]
    return StepFound(
        name=name, outcome=verdict, said=told[0], output=path.name, details=tuple(told[1:])
    )


def answered(name: str, path: Path) -> "StepFound":
    """Which tasks a server was asked."""
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.parity.lm_eval_samples import read_samples

    said = f"Tasks: {', '.join(sorted(read_samples(path)))}."
    return StepFound(name=name, outcome="DONE", said=said, output=path.name)
