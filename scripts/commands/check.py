"""`draftquant check`: what an engine will do with a draft folder, before a server is started.

With `--fix` it writes a repaired copy, and says what the engine will do with that.
"""

import argparse
import dataclasses
from typing import Any

from ...quantize.engines import EngineCheck
from ...quantize.engines.contract import ENGINE_NAMES
from ...quantize.files.hub import resolve_draft
from ..api.check import check
from ..api.opening import Reference
from ..console import print_json, print_table, stdout, table
from .check_fix import add_fix_arguments, check_fix_arguments, fix, print_fix

_EXIT = {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}
_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check DRAFT --engine E`."""
    parser.epilog = (
        "exit codes: 0 LOADS, 1 LOADS BUT WRONG or REFUSED, or the folder is WRONG --against its"
        " source, 2 bad input, 3 UNKNOWN"
    )
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id, quantized or not")
    parser.add_argument(
        "--engine", required=True, choices=ENGINE_NAMES, help="that is to load the draft"
    )
    parser.add_argument(
        "--version", metavar="VERSION", help="of the engine; default: the newest known"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="GPUS", help="tensor-parallel shards")
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="LAYERS",
        help="decoder layers of the target, after which vLLM numbers the draft's",
    )
    parser.add_argument(
        "--arch",
        metavar="GPU",
        help="gfx942, sm90, sm100, or as people say it (mi325x, h100, b200); default: all must"
        " agree",
    )
    add_fix_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    check_fix_arguments(options)
    source = resolve_draft(options.draft)
    answer = _check(source.folder, options)
    if options.fix:
        repaired = fix(source, options)
        after = _check(options.out, options) if repaired.report else answer
        if options.json:
            found = {"before": _mapping(answer), "after": _mapping(after), **repaired.to_mapping()}
            print_json(found)
        else:
            print_fix(repaired)
            _print(after)
            before, after_it = (answer.verdict, "bold"), (after.verdict, "bold")
            stdout().line("before ", before, ", after ", after_it)
        return 1 if repaired.is_refuted else _EXIT[after.verdict]
    if options.json:
        print_json(_mapping(answer))
    else:
        _print(answer)
    return _EXIT[answer.verdict]


def _check(draft: Reference, options: argparse.Namespace) -> EngineCheck:
    return check(
        draft,
        options.engine,
        version=options.version,
        arch=options.arch,
        tp=options.tp,
        target_layers=options.target_layers,
    )


def _mapping(answer: EngineCheck) -> dict[str, Any]:
    findings = [finding._asdict() for finding in answer.findings]
    return {**dataclasses.asdict(answer), "findings": findings}


def _print(answer: EngineCheck) -> None:
    out = stdout()
    where = f"{answer.engine} {answer.version} on {answer.arch or 'any GPU'}, tp {answer.tp}"
    if answer.layers:
        found = table(where, "module in the engine", "taken as", "parameter", "shape", "filled by",
                      spare=("shape", "taken as"))  # fmt: skip
        for layer in answer.layers:
            head = (layer.module, layer.scheme or "floats")
            for parameter in layer.parameters:
                tensors = ", ".join(parameter.tensors) or "nothing"
                found.row(*head, parameter.name, str(list(parameter.shape)), tensors)
                head = ("", "")
        print_table(found)
    verdict = (answer.verdict, f"bold {_COLOURS[answer.verdict]}")
    out.line(verdict, f" in {where} ({answer.evidence})")
    for finding in answer.findings:
        out.line(f"  {finding.stage}: {finding.text}")
        out.line(f"    remedy: {finding.remedy}")
    for note in answer.notes:
        out.line(f"  note: {note}")
    if answer.launch and answer.verdict in ("LOADS", "UNKNOWN"):
        why = "serve it:" if answer.verdict == "LOADS" else "to try it:"
        out.line(f"{why} {answer.launch}")
