"""Who listens to a Python call: nobody in scripts, a bar in notebooks, or whom the caller names."""

import sys
import types
from pathlib import Path

import pytest
from draftquant import api as dq
from draftquant.recipes.listener import SILENT
from draftquant.scripts.frame.ears import usual_listener


class ZMQInteractiveShell:
    """Has the name of the shell of a notebook's kernel, by which one is known."""


class Handle:
    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def update(self, element: str) -> None:
        self._shown.append(element)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules as in a notebook; what its cell shows, one after the other."""
    shown: list[str] = []
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    display = types.ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda *_, **__: Handle(shown)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_shell_tells_a_notebook(kernel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(usual_listener(), dq.ProgressListener)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)  # a script that has it
    assert usual_listener() is SILENT
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", object)  # IPython in a terminal
    assert usual_listener() is SILENT
    monkeypatch.delitem(sys.modules, "IPython")
    assert usual_listener() is SILENT
    assert kernel == []


def test_a_cell_shows_a_moving_bar(kernel: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with dq.ProgressListener().bar("load <b>", None) as bar:
        bar.phase("replay", 4)
        assert bar.measured
        bar.set(3, 4)
        bar.advance()
    assert kernel[0].startswith("<progress></progress> <small>load &lt;b&gt; ")
    assert kernel[1].startswith('<progress value="0" max="4"></progress> <small>replay 0 of 4')
    assert kernel[-1].startswith('<progress value="4" max="4"></progress> <small>replay 4 of 4')
    assert capfd.readouterr() == ("", "")


def test_a_verb_shows_it_by_default_and_elsewhere_it_is_that_of_the_command_line(
    kernel: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = Path(__file__).parent / "pairs" / "eagle3-llama" / "draft"
    dq.quantize(draft, "fp8-ptpc", tmp_path / "out")
    assert any("verify" in each for each in kernel)
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr("draftquant.scripts.frame.progress.SHORT", 0.0)
    monkeypatch.setattr(
        "draftquant.scripts.frame.streams.SPEECH.quiet", False
    )  # as a run may leave it
    with dq.ProgressListener().bar("replay", 2) as bar:
        bar.set(2, 2)
    out, err = capfd.readouterr()
    assert (out, err.partition(" in ")[0]) == ("", "replay: 2")
