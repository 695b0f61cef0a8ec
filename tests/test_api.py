"""`draftquant.api`: its names, its examples as they stand, and one way with the commands."""

import doctest
import inspect
import json
import logging
import pickle
import pydoc
import re
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path

import draftquant
import pytest
from draftquant import api as dq
from draftquant.quantize.files.hub import command_line
from draftquant.quantize.making.quantize_draft import QuantizeReport
from draftquant.recipes import to_mapping
from draftquant.recipes.errors import CheckpointError
from draftquant.recipes.listener import SILENT, Listener
from draftquant.scripts.cli import main
from draftquant.scripts.frame import reports
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.judging.judgement import GateReport
from test_packaging import ROOT, project

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
FUNCTIONS = ("record", "quantize", "verify", "check", "replay", "gate", "card")
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
    dq.record(
        PAIR / "target",
        folder / "twelve.jsonl",
        folder / "TRACES",
        draft=PAIR / "draft",
        max_new_tokens=48,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


def test_the_example_of_every_function(work: Path) -> None:
    for name in FUNCTIONS:
        (found,) = doctest.DocTestFinder().find(getattr(dq, name), name, globs={"dq": dq})
        assert 1 <= len(found.examples) <= 5
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        report: list[str] = []
        runner.run(found, out=report.append)
        assert (runner.failures, runner.tries) == (0, len(found.examples)), "".join(report)
    assert work.is_dir()


def test_what_is_returned_is_what_the_commands_print(work: Path) -> None:
    assert isinstance(dq.quantize("DRAFT", "fp8-ptpc", "FP8"), QuantizeReport)
    assert isinstance(dq.verify("FP8", "DRAFT"), dq.Verification)
    assert isinstance(dq.check("FP8", "sglang", gpu="h200"), dq.CheckReport)
    (one,) = dq.replay(["DRAFT"], "TRACES")
    assert isinstance(one, DraftReplay)
    gate = dq.gate("DRAFT", "FP8", work / "TRACES", policy="screening")
    assert isinstance(gate, GateReport)
    assert gate.num_prompts == 12


def test_a_command_and_its_function_write_equal_bytes(work: Path) -> None:
    """But for the command line, which only the one of them has."""
    assert main(["quantize", "DRAFT", "--recipe", "int4-channel", "--out", "BY_COMMAND"]) == 0
    words = ("draftquant", "quantize", "DRAFT", "--recipe", "int4-channel", "--out", "BY_CALL")
    with command_line(words):
        report = dq.quantize("DRAFT", "int4-channel", work / "BY_CALL")
    assert report.out == work / "BY_CALL"
    sides = [
        {p.name: p.read_bytes() for p in (work / name).iterdir()}
        for name in ("BY_COMMAND", "BY_CALL")
    ]
    assert sides[0] == sides[1]


class Seen(Listener):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_who_listens_is_told(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    dq.replay(["DRAFT"], work / "TRACES", listener=seen)
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
        report = dq.quantize("DRAFT", "mi325x-w4a8", out, backend="torch")
    assert capsys.readouterr().err == ""
    ours = [one for one in caught if one.category is dq.DraftQuantWarning]
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
    with pytest.warns(dq.DraftQuantWarning, match="TARGET is a whole language model"):
        report = dq.quantize("TARGET", "fp8-ptpc", work / "OF_TARGET")
    assert "give the folder of its draft instead" in report.warnings[0]
    for asked in (lambda: dq.inspect("TARGET"), lambda: dq.plan("TARGET", "fp8-ptpc"),
                  lambda: dq.estimate("TARGET", recipes=["fp8-ptpc"])):  # fmt: skip
        with pytest.warns(dq.DraftQuantWarning, match="TARGET is a whole language model"):
            asked()
    with warnings.catch_warnings(record=True):
        assert not any(
            "whole language model" in text
            for text in dq.quantize("DRAFT", "fp8-ptpc", work / "OF_DRAFT").warnings
        )


def test_errors_are_those_of_the_commands(work: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder\n  fix: "):
        dq.quantize("nowhere", "int4-channel", work / "x")
    with pytest.raises(dq.DraftQuantError, match="did you mean 'int4-channel'"):
        dq.quantize("DRAFT", "int4-chanel", work / "x")
    with pytest.raises(dq.DraftQuantError, match="already exists"):
        dq.quantize("DRAFT", "int4-channel", work / "TRACES")
    with pytest.raises(
        dq.DraftQuantError,
        match=r"gate\(policy=\): expected one of 'release', 'screening', got 'mine'",
    ):
        dq.gate("DRAFT", "DRAFT", "TRACES", policy="mine")  # type: ignore[arg-type]
    with pytest.raises(dq.DraftQuantError, match=r'record\(engine="sglang"\): '):
        dq.record("TARGET", "prompts.jsonl", work / "x", engine="sglang")
    assert not (work / "x").exists()


def test_what_tools_ask_of_a_verb_is_there() -> None:
    """Options that are explained, types that resolve, `help()`, and pickling."""
    for name in dq.VERBS:
        function = getattr(dq, name)
        assert inspect.isfunction(function)
        parameters, text = inspect.signature(function).parameters, inspect.getdoc(function) or ""
        assert all(f"\n    {parameter}: " in text for parameter in parameters)
        assert "\nReturns:" in text
        assert "\nRaises:" in text
        assert not {"argv", "on_plan", "on_stage"} & set(parameters)
        hints = typing.get_type_hints(function)
        assert set(hints) == {*parameters, "return"}
        assert not any(isinstance(hint, str) for hint in hints.values())
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 (our own)
        shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
        assert shown.startswith(f"Python Library Documentation: function {name} in module draft")


NOT_PLAIN = re.compile(
    r"\b(?:see `|likewise|codes?|carrier|taught|teach(?:es)?|in effect|told|believed|nobody)\b"
    r"|\bas of `|\bof which\b|\bwhat is no\b",
    re.IGNORECASE,
)
"""Words that people outside of this project would ask about."""


def test_documentation_is_in_plain_words() -> None:
    for name in sorted({*dq.__all__} - {"VERBS"}):
        thing = getattr(dq, name)
        documented = [inspect.unwrap(thing) if name in dq.VERBS else thing]
        if name not in dq.VERBS:
            documented += [
                member
                for key, member in inspect.getmembers(thing)
                if key[0] != "_" and (inspect.isfunction(member) or isinstance(member, property))
            ]
        for each in documented:
            text = inspect.getdoc(each) or ""
            assert text[0].isupper() or text[0] in "0`", text
            assert text.splitlines()[0].endswith((".", "?")), text
            found = NOT_PLAIN.search(text.replace("pickled code", ""))
            assert found is None, f"{found}: {text}"


def test_help_names_keyword_arguments() -> None:
    shown = pydoc.render_doc(dq.quantize, renderer=pydoc.plaintext)
    assert "need traces=" in shown
    assert "--" not in shown


def test_another_process_runs_a_verb(work: Path) -> None:
    """By `spawn`, where a function and what it returns or raises travel as pickles."""
    code = f"""
import multiprocessing
from pathlib import Path
from draftquant import api as dq

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply_async(dq.check, ({str(work / "DRAFT")!r}, "vllm")).get(timeout=120)
        print(report.verdict)
        try:
            pool.apply_async(dq.plan, ("nowhere", "int4-channel")).get(timeout=120)
        except dq.DraftQuantError as exc:
            print(exc)
"""
    script = work / "spawned.py"
    script.write_text(code, encoding="utf-8")
    verdict, *error = said(str(script), cwd=work).splitlines()
    assert verdict in ("LOADS", "LOADS BUT WRONG")
    assert error[0] == "nowhere: no such folder"


def test_arguments_of_another_kind_are_refused_by_name(work: Path) -> None:
    for given, says in (
        ({"num_draft_tokens": "3"}, r"quantize\(num_draft_tokens=\): expected a whole number"),
        ({"num_draft_tokens": True}, "expected a whole number, got 'True'"),
        ({"fix_config": "yes"}, r"quantize\(fix_config=\): expected True or False, got 'yes'"),
        ({"backend": "quarck"}, "did you mean 'quark'"),
        ({"target": 3}, r"quantize\(target=\): expected text or a path, got '3'"),
        ({"input_scale": float("nan")}, "expected a finite number"),
    ):
        with pytest.raises(dq.DraftQuantError, match=says):
            dq.quantize("DRAFT", "int4-channel", work / "x", **given)  # type: ignore[arg-type]
    with pytest.raises(dq.DraftQuantError, match=r"estimate\(draft=\): it is missing"):
        dq.estimate(gpu="h200")  # type: ignore[call-arg]
    with pytest.raises(dq.DraftQuantError, match=r"check\(engine=\): is missing"):
        dq.check("OUT")
    with pytest.raises(dq.DraftQuantError, match="got no candidate=, traces="):
        dq.gate("DRAFT")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'polcy'\n.* policy=\?"):
        dq.gate("DRAFT", "DRAFT", "TRACES", polcy="release")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'arch'\n  fix: did you mean gpu=\?"):
        dq.check("OUT", "vllm", arch="h100")  # type: ignore[call-arg]
    assert not (work / "x").exists()


def test_numbers_out_of_bounds_are_refused_at_both_doors(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        dq.DraftQuantError, match=r"replay\(num_draft_tokens=\): expected at least 1"
    ):
        dq.replay(["DRAFT"], work / "TRACES", num_draft_tokens=0)
    assert main(["replay", "DRAFT", "--traces", "TRACES", "--batch-size", "0"]) == 2
    assert "--batch-size: expected at least 1, got 0" in capsys.readouterr().err


def test_names() -> None:
    assert len(dq.__all__) == len(set(dq.__all__))
    for name in dq.__all__:
        assert getattr(dq, name)
    assert set(dq.VERBS) == {name for name in dq.__all__ if inspect.isfunction(getattr(dq, name))}
    assert set(reports.__all__) <= set(dq.__all__)
    assert draftquant.__version__ == project()["project"]["version"]
    for module, name in ((dq, "quantise"), (draftquant, "gate")):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute"):
            getattr(module, name)


def test_a_recipe_may_be_a_dict_or_a_recipe(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And is recorded as that of a file is."""
    keys = {"name": "mine", "summary": "FP8 of mine", "extends": "fp8-ptpc"}
    text = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (work / "mine.yaml").write_text(text, encoding="utf-8")
    recipe = dq.recipes_show(work / "mine.yaml")
    assert dq.recipes_show(keys) == recipe
    for name, given in {"BY_FILE": "mine.yaml", "BY_DICT": keys, "BY_RECIPE": recipe}.items():
        dq.quantize("DRAFT", given, name)
        assert dq.plan("DRAFT", given).plan.recipe == recipe
    recorded = [(work / name / "draftquant.json").read_bytes() for name in ("BY_FILE", "BY_DICT")]
    assert recorded[0] == recorded[1] == (work / "BY_RECIPE" / "draftquant.json").read_bytes()
    estimated = dq.estimate("DRAFT", recipes=[keys, "int4-channel", recipe], gpus="h200")
    assert list(estimated.loaded_by) == ["mine", "int4-channel"]
    assert capfd.readouterr() == ("", "")


def test_a_dict_is_decoded_as_strictly_as_a_file(work: Path) -> None:
    whole = to_mapping(dq.recipes_show("fp8-ptpc"))
    assert dq.recipes_show(whole) == dq.recipes_show("fp8-ptpc")
    rules = [dict(whole["rules"][0], action="quantise"), *whole["rules"][1:]]
    for keys, where in (
        ({**whole, "rules": rules}, r"recipe, rules\[0\].action: expected one of"),
        ({**whole, "wieghts": {}}, "recipe, wieghts: unknown key\n  fix: did you mean 'weights'"),
        ({"extends": "fp8-ptpc", "summary": "x"}, "recipe, name: missing key"),
        ({**whole, "backend": "quark", "algorithm": {"scale": "mse", "rounding": "nearest"}},
         "recipe, algorithm: backend quark"),
    ):  # fmt: skip
        with pytest.raises(dq.DraftQuantError, match=where):
            dq.quantize("DRAFT", keys, work / "x")
    two = {**whole, "layout": "fp9", "backend": "torsh"}
    with pytest.raises(dq.DraftQuantError, match=r"recipe, backend: [^$]*recipe, layout: "):
        dq.plan("DRAFT", two)
    assert not (work / "x").exists()


@pytest.mark.usefixtures("work")
def test_one_stands_for_a_list_of_one_and_shares_are_read_as_on_the_command_line() -> None:
    (one,) = dq.replay("DRAFT", "TRACES")
    assert one.name == "DRAFT"
    report = dq.gate("DRAFT", "DRAFT", "TRACES", unrelated=True, max_relative_drop="2%")  # type: ignore[arg-type]
    assert isinstance(report, GateReport)
    assert report.policy.max_relative_drop == 0.02
    with pytest.raises(
        dq.DraftQuantError,
        match=r"gate\(max_relative_drop=\): expected a share such as 0.01 or 1%, got 'little'",
    ):
        dq.gate("DRAFT", "DRAFT", "TRACES", max_relative_drop="little")  # type: ignore[arg-type]
    with pytest.raises(dq.DraftQuantError, match=r"gate\(measured=\): expected 2 values, got 1"):
        dq.gate(measured="A.json")


def test_notes_go_to_the_log_and_warnings_into_every_report(
    work: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "draftquant"):
        dq.replay(["DRAFT"], "TRACES")
    assert any(one.message.startswith("memory of this process") for one in caplog.records)
    assert {(one.name, one.levelno) for one in caplog.records} == {("draftquant", logging.INFO)}
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "draftquant"):
        dq.quantize("DRAFT", "fp8-ptpc", work / "LOGGED")
    stages = [one.message for one in caplog.records if one.levelno == logging.DEBUG]
    assert stages[0] == "check"
    assert {"write", "verify"} <= set(stages)
    assert any(type(one) is logging.NullHandler for one in logging.getLogger("draftquant").handlers)
    with pytest.warns(dq.DraftQuantWarning) as caught:
        report = dq.gate("DRAFT", "LOGGED", "TRACES", policy="screening")
    assert tuple(str(one.message) for one in caught) == report.warnings
    with pytest.warns(dq.DraftQuantWarning) as caught:
        planned = dq.plan("DRAFT", "mi325x-w4a8", backend="torch")
    assert tuple(str(one.message) for one in caught) == planned.warnings
    capsys.readouterr()
    asked = ["quantize", "DRAFT", "--recipe", "fp8-ptpc", "--traces", "TRACES", "--out", "UNUSED"]
    assert main([*asked, "--json"]) == 0
    assert "is not used" in " ".join(json.loads(capsys.readouterr().out)["warnings"])


def said(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_the_package_quantize_is_a_package(tmp_path: Path) -> None:
    """And nothing else, whichever was imported first; neither loads torch."""
    code = """
import sys
import draftquant.quantize.planning.quantization_plan as p
from draftquant import api, quantize
assert quantize.planning.quantization_plan is p
assert not callable(quantize) and callable(api.quantize)
print(sorted({"torch", "transformers", "rich"} & sys.modules.keys()))
"""
    assert said("-c", code, cwd=tmp_path) == "[]\n"


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
