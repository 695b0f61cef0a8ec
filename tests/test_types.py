"""What a type checker sees of the public module, in the lines that a page of docs shows."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PYRIGHT = Path(sys.executable).with_name("pyright")


def errors_in(code: str, folder: Path) -> list[str]:
    """What pyright says of a file, beside nothing of this repository."""
    script = folder / "snippet.py"
    script.write_text(code, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text("{}")  # else one of a folder above counts
    command = [PYRIGHT, "--pythonpath", sys.executable, "--outputjson", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    return [one["message"].partition("\n")[0] for one in found if one["severity"] == "error"]


def test_the_lines_of_the_page_have_types(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert all("dq.gate(" in code for code in snippets)
    assert [errors_in(code, tmp_path) for code in snippets] == [[]] * len(snippets) != []


def test_mistakes_are_seen_before_anything_runs(tmp_path: Path) -> None:
    code = """
from draftquant import api as dq

dq.quantize("DRAFT", "fp8-ptpc")
dq.quantize("DRAFT", "fp8-ptpc", "OUT", backend="quarck")
dq.gate("DRAFT", "OUT", "TRACES", polcy="release")
dq.verify("OUT", against="DRAFT").okay
dq.quantise
"""
    missing, literal, keyword, attribute, function = errors_in(code, tmp_path)
    assert 'missing for parameter "out"' in missing
    assert "Literal['quarck']" in literal
    assert '"polcy"' in keyword
    assert '"okay"' in attribute
    assert '"quantise"' in function
