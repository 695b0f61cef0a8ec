"""The list of faults that the tests must catch does not rot; `./scripts/test --faults` runs it."""

import ast
from collections import Counter
from pathlib import Path

from faults.run import Fault, read_faults

ROOT = Path(__file__).parents[1]
FAULTS = read_faults()


def test_names_are_given_once() -> None:
    assert FAULTS
    assert [name for name, count in Counter(f.name for f in FAULTS).items() if count > 1] == []


def test_every_fault_still_applies() -> None:
    wrong = {fault.name: problem for fault in FAULTS if (problem := problem_of(fault))}
    assert wrong == {}


def problem_of(fault: Fault) -> str | None:
    """Why a fault says nothing any more; None = it does."""
    if problem := fault.problem(ROOT):
        return problem
    path = ROOT / fault.file
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8").replace(fault.text, fault.replacement)
        ast.parse(source, fault.file)
    if fault.text == fault.replacement or not fault.harm or not fault.tests:
        return "it changes nothing, does no harm, or names no test"
    absent = [test for test in fault.tests if not (ROOT / "tests" / test).is_file()]
    return f"no test {absent[0]}" if absent else None
