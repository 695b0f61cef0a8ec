"""`draftquant check`: prints what an engine will do with a draft folder."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..api.check import check
from ..console import print_json, print_table, stdout, table
from .pair import print_pair

if TYPE_CHECKING:
    from ...quantize.drafts.engine_traits import Stage
    from ...quantize.engines import EngineCheck
    from ...quantize.engines.contract import Verdict

VERB = check
EPILOG = "exit codes: 0 LOADS, 1 LOADS BUT WRONG or REFUSED, 2 bad input, 3 UNKNOWN"
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


def run(options: argparse.Namespace) -> int:
    """Check, and print the engine's answer; 1 where it refuses or reads otherwise."""
    report = check.run(options.settings)
    if options.json:
        print_json(report.to_mapping())
        return report.exit_code
    if report.pair is not None:
        print_pair(report.pair)
    else:
        _print(report.answer)
    return report.exit_code


def _print(answer: "EngineCheck") -> None:
    out = stdout()
    where = answer.gpu if answer.tp == 1 else f"{answer.tp} x {answer.gpu}"
    if answer.layers:
        found = table(f"{answer.title} on {where}", "module in the engine", "taken as",
                      "parameter", "shape", "filled by", spare=("shape", "taken as"))  # fmt: skip
        for layer in answer.layers:
            head = (layer.module, layer.scheme or "not quantized")
            for parameter in layer.parameters:
                tensors = ", ".join(parameter.tensors) or "nothing"
                found.row(*head, parameter.name, str(list(parameter.shape)), tensors)
                head = ("", "")
        print_table(found)
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
