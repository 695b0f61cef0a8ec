"""The everyday tests: how cases are chosen, and that all of them together stay short."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from everyday import BUDGET, UNMEASURED
from told import KEPT

HERE = Path(__file__).parent


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
def test_workers_are_as_one_process(body: str, status: int, said: str, tmp_path: Path) -> None:
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
