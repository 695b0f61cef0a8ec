"""`draftquant check`: what an engine will do with a draft folder, before a server is started."""

import argparse
import dataclasses
import typing

from ...quantize.engines import EngineCheck, check_draft
from ...quantize.engines.contract import Arch, EngineName
from ...quantize.hub import resolve_draft
from ..console import print_json, print_table, stdout, table

_EXIT = {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}
_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check DRAFT --engine E`."""
    parser.epilog = "exit codes: 0 LOADS, 1 LOADS BUT WRONG or REFUSED, 2 bad input, 3 UNKNOWN"
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id, quantized or not")
    parser.add_argument("--engine", required=True, choices=typing.get_args(EngineName))
    parser.add_argument("--version", metavar="V", help="of the engine; only one is known of each")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel shards")
    parser.add_argument("--arch", choices=typing.get_args(Arch), help="default: all must agree")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    source = resolve_draft(options.draft)
    answer = check_draft(
        source.folder,
        engine=options.engine,
        version=options.version,
        arch=options.arch,
        tp=options.tp,
    )
    if options.json:
        found = dataclasses.asdict(answer)
        found["findings"] = [finding._asdict() for finding in answer.findings]
        print_json(found)
    else:
        _print(answer)
    return _EXIT[answer.verdict]


def _print(answer: EngineCheck) -> None:
    out = stdout()
    where = f"{answer.engine} {answer.version} on {answer.arch or 'any GPU'}, tp {answer.tp}"
    if answer.layers:
        found = table(where, "module in the engine", "taken as", "stored tensors")
        for layer in answer.layers:
            tensors = ", ".join(layer.tensors) or "none"
            found.add_row(layer.module, layer.scheme or "floats", tensors)
        print_table(found)
    out.print(
        f"[bold {_COLOURS[answer.verdict]}]{answer.verdict}[/] in {where} ({answer.evidence})"
    )
    for finding in answer.findings:
        out.print(f"  {finding.stage}: {finding.text}", markup=False)
        out.print(f"    remedy: {finding.remedy}", markup=False)
    if answer.launch:
        out.print("serve it:", answer.launch, markup=False, soft_wrap=True)
