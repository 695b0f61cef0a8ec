"""The notebook of the tutorials, run as it stands by a kernel of this interpreter."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The notebook with its outputs; no settings of the tester's own are read."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home / name))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TMPDIR", str(home))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
        )
        yield client.execute()


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
def test_the_whole_job(executed: Any) -> None:
    """With short reports, bars while it runs, the page of the gate, and the picture."""
    results = {
        cell.source: {kind for each in cell.outputs for kind in each.get("data", {})}
        for cell in executed.cells
        if cell.cell_type == "code"
    }
    (shown,) = (
        each for each in outputs(executed, "report = dq.gate(") if "execution_count" in each
    )
    assert "<iframe srcdoc=" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<GateReport PASS; acceptance length ")
    assert any("image/svg+xml" in kinds for kinds in results.values())
    (verified,) = outputs(executed, "dq.verify(")[-1:]
    assert verified.data["text/plain"].startswith("<Verification verified, every byte; ")
    assert '<table class="dq">' in verified.data["text/html"]
    bars = [each for each in outputs(executed, "traces = dq.record(") if "data" in each]
    assert any("<progress " in each.data.get("text/html", "") for each in bars)
    (error,) = outputs(executed, "except dq.DraftQuantError")
    assert error.text.startswith("gate(num_draft_tokens=): expected at least 1, got 0\n  fix: ")
    for cell in executed.cells:
        for each in cell.get("outputs", ()):
            assert len(each.get("data", {}).get("text/plain", "")) < 600
