"""The list of faults that the tests must catch does not rot; `./scripts/test --faults` runs it."""

import ast
from collections import Counter
from pathlib import Path

from faults.run import Fault, read_faults

ROOT = Path(__file__).parents[1]
FAULTS = read_faults()


def test_names_are_given_once() -> None:
    assert {*Counter(fault.name for fault in FAULTS).values()} == {1}


def test_every_fault_still_applies() -> None:
    wrong = {fault.name: problem for fault in FAULTS if (problem := problem_of(fault))}
    assert wrong == {}


def problem_of(fault: Fault) -> str | None:
    """Why a fault says nothing any more; None = it does."""
    if problem := fault.problem(ROOT):
        return problem
    path = ROOT / fault.file
    if path.suffix == ".py":
        before, after = path.read_text(encoding="utf-8").split(fault.text)
        block = before.rpartition("\n\n\n")[2], fault.replacement, after.partition("\n\n\n")[0]
        ast.parse("".join(block), fault.file)  # a function or class, as two empty lines end it
    if fault.text == fault.replacement or not fault.harm or not fault.tests:
        return "it changes nothing, does no harm, or names no test"
    absent = [test for test in fault.tests if not (ROOT / "tests" / test).is_file()]
    return f"no test {absent[0]}" if absent else None
