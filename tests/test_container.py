"""Containerfile, as far as it can be seen without a daemon that builds images.

Its step that installs is run for real by `check_wheel` (scripts/check_wheel.sh), with the wheel.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Its instructions in order, each with what follows it."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    whole = re.sub(r"\\\n\s*", "", lines).splitlines()
    return [line.partition(" ")[::2] for line in whole if line]


def of(steps: list[tuple[str, str]], name: str) -> list[str]:
    return [value for found, value in steps if found == name]


def test_nothing_is_fetched(steps: list[tuple[str, str]]) -> None:
    """It builds with --network none: from wheels alone, and of the context it takes these alone."""
    assert of(steps, "FROM") == ["${BASE} AS build", "${BASE}"]
    runs = of(steps, "RUN")
    assert len(runs) == 2
    (installs,) = (run for run in runs if "pip" in run)
    assert "--no-index --find-links /wheels" in installs
    assert not re.search(r"curl|wget|apt-get|apk |https?:|git ", " ".join(runs))
    assert [copy for copy in of(steps, "COPY") if "--from=build" not in copy] == ["*.whl /wheels/"]
    assert of(steps, "COPY")[1].split()[1] in installs


def test_it_runs_draftquant_and_not_as_root(steps: list[tuple[str, str]]) -> None:
    assert json.loads(of(steps, "ENTRYPOINT")[0]) == ["draftquant"]
    (user,) = of(steps, "USER")
    assert re.search(rf"useradd --uid [1-9]\d* --create-home {user}\b", " ".join(of(steps, "RUN")))
    names = [name for name, _ in steps]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_the_step_that_installs_is_the_one_that_is_run(steps: list[tuple[str, str]]) -> None:
    source = 'ROOT="$1"; source "$1/scripts/check_wheel.sh"; install_step'
    words = ["bash", "-c", source, "bash", str(ROOT)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == of(steps, "RUN")[0]
    assert '"draftquant[${EXTRAS}]"' in run.stdout
