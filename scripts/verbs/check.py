"""`check`: what an engine will do with a draft folder, before a server is started."""

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.asked import Checking
from ...quantize.engines.contract import TITLES
from ...quantize.engines.versions import ENGINES
from ...quantize.gpus import gpu_names
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...quantize.drafts.engine_traits import Stage
    from ...quantize.engines.contract import EngineCheck, Verdict
    from ...quantize.pairing.pair import EnginePair, PairCheck, PairFinding

_GPUS = [f"{gpu_names(each.archs)} in {TITLES[each.name]}" for each in ENGINES.values()]


_FIGURES = {"usual_gpus": "; ".join(_GPUS), "python": sys.executable}


@verb(Checking, exclusive=("target", "target_layers"), figures=_FIGURES)
def check(settings: Checking) -> "reports.CheckReport | reports.AskedCheck":
    """Predict what engines do with a draft, or ask one that is installed. Predicting needs none.

    Example:
        >>> answer = dq.check("OUT", "vllm", gpu="h200")
        >>> answer.verdict, answer.remedy
        ('LOADS', None)

    Returns:
        LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN by the engine, or by the best of all, the
        reasons, and what to do.

    Raises:
        CheckpointError: the folder holds no draft, or there is no engine or GPU of this name.
        DeviceError: the engine that is to be asked cannot be.
    """
    if settings.ask is not None:
        from ...quantize.asking.ask import ask_engine

        settings.listener.note(f"{settings.ask} runs the engine's own code on {settings.draft}")
        return ask_engine(settings)
    from ...quantize.pairing.pair_check import check_as_asked

    return check_as_asked(settings, partial(_largest_feature, settings.traces))


def _largest_feature(traces: AnyPath | None) -> float | None:
    if traces is None:
        return None
    from ...calibration.traces.trace_folder import TraceFolder

    folder = TraceFolder.open(Path(traces))
    return max((float(prompt.features.abs().max()) for prompt in folder), default=0.0)


_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}
_VERDICTS: Mapping["Verdict", str] = {
    "LOADS": "{engine} loads this draft on {where}.",
    "LOADS BUT WRONG": "{engine} loads this draft on {where} without an error, and serves it"
    " wrongly: few of its tokens would be accepted.",
    "REFUSED": "{engine} ends with an error when it loads this draft on {where}.",
    "UNKNOWN": "it is not known what {engine} does with this draft on {where}.",
}
_WHEN: Mapping["Stage", str] = {
    "config": " (reading config.json)",
    "init": " (building the model)",
    "load": " (loading the tensors)",
    "unknown": "",
    "wrong": "",
    "after load": " (after loading)",
}
"""What an engine was doing when it found a fault."""
_WORDS = {"refused": "error"}
"""Levels that need another word than their names."""


def _show(report: "reports.CheckReport | reports.AskedCheck", _settings: object) -> None:
    if isinstance(report, reports.AskedCheck):
        _print_asked(report)
    elif report.pair is not None:
        _print_pair(report.pair)
    elif len(report.answers) == 1:
        _print(report.answer)
    else:
        _print_lines(report.answers)


def _print_asked(asked: "reports.AskedCheck") -> None:
    out = stdout()
    out.line((asked.verdict, f"bold {_COLOURS[asked.verdict]}"), f": {asked.sentence}")
    for label, names in (
        ("no tensor fills the parameter", asked.unloaded),
        ("no parameter takes the tensor", asked.unread),
        ("another dtype holds it", asked.cast),
        ("different scales of parts became one", asked.merged),
    ):
        for name in names:
            out.line(f"  {label}: {name}")
    for each in asked.linears:
        if not each.is_right:
            out.line(f"  {each.sentence}")
    for name, why in (asked.not_run or {}).items():
        out.line(f"  not run: {name}: {why}")
    if asked.left_out:
        out.line(f"  code that the engine was not given: {', '.join(asked.left_out)}")
    if asked.remedy:
        out.line(f"    what to do: {asked.remedy}")


def _print_lines(answers: "Iterable[EngineCheck]") -> None:
    """One line for each engine: where it loads the draft, or why not."""
    out = stdout()
    for answer in answers:
        why = f": {answer.error}" if answer.error else ""
        out.line(
            (answer.verdict, f"bold {_COLOURS[answer.verdict]}"),
            f": {answer.title} on {_where(answer)}{why}",
        )
    out.line("add --engine for reasons, what to do, and how to serve it")


def _where(answer: "EngineCheck") -> str:
    return answer.gpu if answer.tp == 1 else f"{answer.tp} x {answer.gpu}"


def _print(answer: "EngineCheck") -> None:
    out = stdout()
    where = _where(answer)
    if answer.linears:
        rows = table(f"{answer.title} on {where}", "linear in the engine", "taken as")
        for name, taken in answer.linears.items():
            rows.row(name, taken or "not quantized")
        print_table(rows)
    verdict = (answer.verdict, f"bold {_COLOURS[answer.verdict]}")
    sentence = _VERDICTS[answer.verdict].format(engine=answer.title, where=where)
    findings = list(answer.findings)
    if answer.by_gpu:
        differs, *findings = findings
        remedy = differs.remedy[:1].upper() + differs.remedy[1:]
        out.line((f"{differs.text}. {remedy}.", f"bold {_COLOURS['UNKNOWN']}"))
    else:
        out.line(verdict, f": {sentence}")
    for finding in findings:
        out.line(f"  why{_WHEN[finding.stage]}: {finding.text}")
        out.line(f"    what to do: {finding.remedy}")
    for note in answer.notes:
        out.line(f"  note: {note}")
    if answer.evidence:
        out.line(f"  how this is known: {answer.evidence}")
    if answer.launch and answer.verdict in ("LOADS", "UNKNOWN"):
        out.line(f"{'serve' if answer.verdict == 'LOADS' else 'try'} it: {answer.launch}")
        if answer.launch_note:
            out.line(f"  {answer.launch_note}")


def _print_pair(pair: "PairCheck") -> None:
    out = stdout()
    common = [finding for finding in pair.findings if finding.engine is None]
    if common:
        out.line(("in every engine", "bold"))
        _print_findings(common)
    for each in pair.engines:
        _print_engine(each)
    sizes = ", ".join(map(str, pair.tensor_parallel))
    out.line(("tensor parallel: ", "bold"), f"draft and target can both be split over {sizes} GPUs")
    for text in pair.not_compared:
        out.line(("not compared: ", "bold"), text)


def _print_engine(pair: "EnginePair") -> None:
    out, alone = stdout(), pair.answer
    colour = f"bold {_COLOURS[pair.verdict]}"
    out.line((pair.verdict, colour), f": {alone.title} on {_where(alone)}")
    for finding in alone.findings:
        out.line(f"  the draft alone: {finding.text}")
        out.line(f"    what to do: {finding.remedy}")
    for note in alone.notes:
        out.line(f"  note: {note}")
    _print_findings(finding for finding in pair.findings if finding.engine is not None)
    if pair.launch and pair.verdict in ("LOADS", "UNKNOWN"):
        out.line(f"  {'serve' if pair.verdict == 'LOADS' else 'try'} it: {pair.launch}")
        if alone.launch_note:
            out.line(f"    {alone.launch_note}")


def _print_findings(findings: "Iterable[PairFinding]") -> None:
    out = stdout()
    for finding in findings:
        out.line(f"  {_WORDS.get(finding.level, finding.level)}: {finding.text}")
        if finding.remedy:
            out.line(f"    what to do: {finding.remedy}")


COMMAND = Command(check, _show)
