"""Prints what engines do with a draft beside its target, and the commands that serve the two."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..console import stdout

if TYPE_CHECKING:
    from ...quantize.pairing import EnginePair, PairCheck, PairFinding

_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}
_WORDS = {"refused": "error"}
"""Levels that are not said by their names."""


def print_pair(pair: "PairCheck") -> None:
    """What holds in every engine, then each engine's verdict, reasons and command."""
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
    where = alone.gpu if alone.tp == 1 else f"{alone.tp} x {alone.gpu}"
    colour = f"bold {_COLOURS[pair.verdict]}"
    out.line((pair.verdict, colour), f": {alone.title} on {where}")
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
