"""`import draftquant`: its names, its examples as they stand, and one way with the commands."""

import ast
import doctest
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import draftquant
import pytest
from draftquant.quantize.engines import EngineCheck
from draftquant.quantize.errors import CheckpointError
from draftquant.quantize.quantize import QuantizeReport
from draftquant.quantize.verify.folder import VerifyReport
from draftquant.scripts.api.replay import replay
from draftquant.scripts.api.watch import SILENT, Watch
from draftquant.scripts.cli import main
from draftquant.validate.counting.draft_replay import DraftReplay
from draftquant.validate.judging.judgement import GateReport
from test_packaging import ROOT, project

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
FUNCTIONS = ("record", "quantize", "verify", "check", "replay", "gate", "card", "push")
"""In an order in which each finds what those before it wrote."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the examples name: DRAFT, TARGET, TRACES, prompts.jsonl; they write OUT and NEW."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "DRAFT").symlink_to(PAIR / "draft")
    (folder / "TARGET").symlink_to(PAIR / "target")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    (folder / "twelve.jsonl").write_text("".join(lines[:12]), encoding="utf-8")
    draftquant.record(
        PAIR / "target",
        folder / "twelve.jsonl",
        folder / "TRACES",
        draft=PAIR / "draft",
        max_new_tokens=48,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_every_function(name: str, work: Path) -> None:
    function = getattr(draftquant, name)
    real = function._function if name == "quantize" else function
    (found,) = doctest.DocTestFinder().find(real, name, globs={"draftquant": draftquant})
    assert 1 <= len(found.examples) <= 5
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    runner.run(found, out=report.append)
    assert (runner.failures, runner.tries) == (0, len(found.examples)), "".join(report)
    assert work.is_dir()


def test_what_is_returned_is_what_the_commands_print(work: Path) -> None:
    assert isinstance(draftquant.quantize("DRAFT", "fp8-ptpc", "FP8"), QuantizeReport)
    assert isinstance(draftquant.verify("FP8", "DRAFT"), VerifyReport)
    assert isinstance(draftquant.check("FP8", "sglang", arch="h200"), EngineCheck)
    (one,) = draftquant.replay(["DRAFT"], "TRACES")
    assert isinstance(one, DraftReplay)
    gate = draftquant.gate("DRAFT", "FP8", work / "TRACES", policy="screening")
    assert isinstance(gate, GateReport)
    assert gate.num_prompts == 12


def test_a_command_and_its_function_write_equal_bytes(work: Path) -> None:
    """But for the command line, which only the one of them has."""
    assert main(["quantize", "DRAFT", "--recipe", "int4-channel", "--out", "BY_COMMAND"]) == 0
    report = draftquant.quantize(
        "DRAFT", "int4-channel", work / "BY_CALL", argv=("draftquant", "quantize", "DRAFT",
        "--recipe", "int4-channel", "--out", "BY_CALL"),
    )  # fmt: skip
    assert report.out == work / "BY_CALL"
    sides = [
        {p.name: p.read_bytes() for p in (work / name).iterdir()}
        for name in ("BY_COMMAND", "BY_CALL")
    ]
    assert sides[0] == sides[1]


class Seen(Watch):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_who_watches_is_told(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    draftquant.replay(["DRAFT"], work / "TRACES", watch=seen)
    assert any(line.startswith("memory of this process") for line in seen.lines)
    with SILENT.bar("nothing", 3) as bar:
        bar.advance()
        bar.set(2, 3)
        bar.label("still")
    SILENT.line("not shown")
    assert capfd.readouterr() == ("", "")


def test_what_the_command_warns_of_is_a_python_warning_and_in_the_report(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = work / "WARNED"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = draftquant.quantize("DRAFT", "mi325x-w4a8", out, backend="torch")
    assert capsys.readouterr().err == ""
    ours = [one for one in caught if one.category is draftquant.DraftQuantWarning]
    assert tuple(str(one.message) for one in ours) == report.warnings
    assert {one.filename for one in ours} == {__file__}  # where the caller's own line is
    assert report.warnings[0].startswith("no known engine loads what recipe mi325x-w4a8 makes")
    assert {one.verdict for one in report.loads} == {"REFUSED", "UNKNOWN"}  # TensorRT-LLM's
    command = ["quantize", "DRAFT", "--recipe", "mi325x-w4a8", "--backend", "torch"]
    assert main([*command, "--out", str(work / "SAID")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    for text in report.warnings:
        assert f"warning: {' '.join(text.split())}" in said


def test_a_whole_language_model_is_said_to_look_like_the_target(work: Path) -> None:
    with pytest.warns(draftquant.DraftQuantWarning, match="TARGET is a whole language model"):
        report = draftquant.quantize("TARGET", "fp8-ptpc", work / "OF_TARGET")
    assert "give the folder of its draft instead" in report.warnings[0]
    with warnings.catch_warnings(record=True):
        assert not any(
            "whole language model" in text
            for text in draftquant.quantize("DRAFT", "fp8-ptpc", work / "OF_DRAFT").warnings
        )


def test_a_plan_that_is_not_liked_ends_the_run(work: Path) -> None:
    def refuse(plan: object) -> None:
        raise KeyError(type(plan).__name__)

    with pytest.raises(KeyError, match="Plan"):
        draftquant.quantize("DRAFT", "int4-channel", work / "REFUSED", on_plan=refuse)
    assert not (work / "REFUSED").exists()


def test_errors_are_those_of_the_commands(work: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder\n  fix: "):
        draftquant.quantize("nowhere", "int4-channel", work / "x")
    with pytest.raises(draftquant.DraftQuantError, match="did you mean 'int4-channel'"):
        draftquant.quantize("DRAFT", "int4-chanel", work / "x")
    with pytest.raises(draftquant.DraftQuantError, match="already exists"):
        draftquant.quantize("DRAFT", "int4-channel", work / "TRACES")
    with pytest.raises(draftquant.DraftQuantError, match="no policy 'mine'"):
        draftquant.gate("DRAFT", "DRAFT", "TRACES", policy="mine")  # type: ignore[arg-type]
    with pytest.raises(draftquant.DraftQuantError, match="--engine sglang"):
        draftquant.record("TARGET", "prompts.jsonl", work / "x", engine="sglang")
    assert not (work / "x").exists()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_keywords_that_are_explained(name: str) -> None:
    signature = inspect.signature(getattr(draftquant, name))
    options = [p for p in signature.parameters.values() if p.default is not p.empty]
    assert options
    assert {p.kind for p in options} == {inspect.Parameter.KEYWORD_ONLY}
    function = getattr(draftquant, name)
    text = inspect.getdoc(function._function if name == "quantize" else function) or ""
    for parameter in signature.parameters:
        assert f"\n    {parameter}: " in text
    assert "\nRaises:" in text


def test_names() -> None:
    assert set(draftquant.__all__) <= set(dir(draftquant))
    for name in draftquant.__all__:
        assert getattr(draftquant, name)
    assert draftquant.__version__ == project()["project"]["version"]
    assert draftquant.replay is replay
    with pytest.raises(AttributeError, match="module 'draftquant' has no attribute 'quantise'"):
        _ = draftquant.quantise  # type: ignore[attr-defined]


def said(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_the_package_quantize_is_a_package_and_a_function(tmp_path: Path) -> None:
    """Also where a module of it was imported first, under whatever name."""
    code = """
import sys
import draftquant.quantize.plan as p
import draftquant
from draftquant import quantize
from draftquant.quantize import plan
assert draftquant.quantize.plan is p is plan
assert quantize is draftquant.quantize is sys.modules["draftquant.quantize"]
assert callable(quantize)
star = {}
exec("from draftquant import *", star)
assert star["quantize"] is quantize and star["gate"] is draftquant.gate
print(sorted({"torch", "transformers", "rich", "scipy"} & sys.modules.keys()))
"""
    # `gate` reads policies, whose statistics need scipy.
    assert said("-c", code, cwd=tmp_path) in ("[]\n", "['scipy']\n")


def test_importing_costs_nothing(tmp_path: Path) -> None:
    code = "import sys, draftquant; print({n for n in sys.modules if n.startswith('draftquant')})"
    assert ast.literal_eval(said("-c", code, cwd=tmp_path)) == {"draftquant", "draftquant.quantize"}


def test_python_m_draftquant_is_the_command_line(tmp_path: Path) -> None:
    as_module = said("-m", "draftquant", "recipes", "list", "--json", cwd=tmp_path)
    assert "int4-channel" in json.dumps(json.loads(as_module))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        said("-m", "draftquant", "plan", "nowhere", "--recipe", "fp8-ptpc", cwd=tmp_path)
    assert caught.value.returncode == 2


def test_the_readme_of_the_package_runs(work: Path) -> None:
    """The lines that the package's own docstring shows."""
    lines = [
        line[4:] for line in (draftquant.__doc__ or "").splitlines() if line.startswith("    ")
    ]
    code = "\n".join(lines).replace('"OUT"', '"SHOWN"')
    assert "gate(" in code
    exec(compile(code, "docstring", "exec"), {})
    assert (work / "SHOWN" / "config.json").is_file()
    assert (ROOT / "scripts" / "draftquant" / "py.typed").is_file()
