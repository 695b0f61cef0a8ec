"""The everyday tests: how cases are chosen, and that all of them together stay short."""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from everyday import BUDGET, UNMEASURED, each_value, spread, table
from told import KEPT

HERE = Path(__file__).parent


def case(*values: str) -> frozenset[tuple[str, str]]:
    return frozenset(zip("abc", values, strict=False))


@pytest.mark.parametrize(
    ("cases", "chosen"),
    [
        ([case("x", "1"), case("x", "2"), case("y", "1"), case("y", "2")], [0, 3]),
        ([case("x", "1"), case("x", "2"), case("x", "3")], [0, 1, 2]),
        ([case("x", "1"), case("y", "1"), case("y", "2"), case("z", "2")], [0, 2, 3]),
    ],
)
def test_each_value_is_in_a_case(
    cases: list[frozenset[tuple[str, str]]], chosen: list[int]
) -> None:
    assert sorted(each_value(cases)) == chosen


def test_some_cases_are_spread() -> None:
    assert list(spread(10, 3)) == [0, 3, 6]
    assert list(spread(2, 3)) == [0, 1]


def test_what_is_written_is_read() -> None:
    written = table({"everyday": Counter({"a.py": 1.04, "b.py": 2.0}), "slow": Counter()})
    assert tomllib.loads(written) == {"everyday": {"b.py": 2.0, "a.py": 1.0}, "slow": {}}


def test_everyday_tests_are_short() -> None:
    """If not: mark what is slow, see that faults are still caught, and measure again."""
    measured = tomllib.loads((HERE / "durations.toml").read_text(encoding="utf-8"))
    files = {path.name for path in HERE.glob("test_*.py")}
    unknown = files - measured["everyday"].keys() - measured["slow"].keys()
    assert sum(measured["everyday"].values()) + UNMEASURED * len(unknown) <= BUDGET, sorted(unknown)


def test_no_text_is_kept_of_a_test_that_is_gone() -> None:
    for file in KEPT.glob("*.txt"):
        told = set(re.findall(r"^## (test_.+)$", file.read_text(encoding="utf-8"), re.MULTILINE))
        tests = (HERE / f"test_{file.stem}.py").read_text("utf-8") if told else ""
        known = re.findall(r"^def (test_\w+)", tests, re.MULTILINE)
        assert {one.partition("[")[0] for one in told} <= {*known}, file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        pytest.param("pass", 0, "4 passed", marks=pytest.mark.slow),
        ("assert value != 3", 1, "test_2.py::test_each[3]"),
        ("assert value != 3 or os._exit(9)", 1, "a worker ended with 9"),
    ],
)
def test_workers_say_what_one_process_would(
    body: str, status: int, said: str, tmp_path: Path
) -> None:
    for file in (1, 2):
        (tmp_path / f"test_{file}.py").write_text(
            "import os, pytest\n"
            f"@pytest.mark.parametrize('value', [{2 * file - 1}, {2 * file}])\n"
            f"def test_each(value, tmp_path):\n    print(tmp_path)\n    {body}\n",
            encoding="utf-8",
        )
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "workers", "--workers", "2", "."]
    path = {"PYTHONPATH": str(HERE), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr
