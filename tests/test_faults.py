"""The list of faults that the tests must catch does not rot; `./scripts/test --faults` runs it."""

from collections import Counter
from pathlib import Path

import pytest
from faults.run import Fault, read_faults

ROOT = Path(__file__).parents[1]
FAULTS = read_faults()


def test_names_are_given_once() -> None:
    assert len(FAULTS) >= 57
    assert [name for name, count in Counter(f.name for f in FAULTS).items() if count > 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_every_fault_still_applies(fault: Fault) -> None:
    assert fault.problem(ROOT) is None
    assert fault.text != fault.replacement
    assert fault.harm
    path = ROOT / fault.file
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8").replace(fault.text, fault.replacement)
        compile(source, fault.file, "exec")
    assert fault.tests
    assert [test for test in fault.tests if not (ROOT / "tests" / test).is_file()] == []
