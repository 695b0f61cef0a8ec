"""The notebook of the tutorials, run as it stands by a kernel of this interpreter."""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def outputs(notebook: Any, start: str) -> list[Any]:
    """What the one cell gave whose source has these words."""
    (cell,) = (each for each in notebook.cells if start in each.source)
    found: list[Any] = cell.outputs
    return found


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
def test_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short reports, bars while it runs, the page of the gate, and the picture."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # no settings of the tester's own are read
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    executed = NotebookClient(notebook, timeout=600, resources=where).execute()
    (shown,) = (
        each for each in outputs(executed, "report = dq.gate(") if "execution_count" in each
    )
    assert "<iframe srcdoc=" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<GateReport PASS; acceptance length ")
    (verified,) = outputs(executed, "dq.verify(")[-1:]
    assert verified.data["text/plain"].startswith("<Verification verified, every byte; ")
    assert '<table class="dq">' in verified.data["text/html"]
    bars = [each for each in outputs(executed, "traces = dq.record(") if "data" in each]
    assert any("<progress " in each.data.get("text/html", "") for each in bars)
    (error,) = outputs(executed, "except dq.DraftQuantError")
    assert error.text.startswith("gate(num_draft_tokens=): expected at least 1, got 0\n  fix: ")
    every = [each.get("data", {}) for cell in executed.cells for each in cell.get("outputs", ())]
    assert any("image/svg+xml" in data for data in every)
    assert max(len(data.get("text/plain", "")) for data in every) < 600
