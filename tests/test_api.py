"""`draftquant.api`: its names, its examples as they stand, and one way with the commands."""

import doctest
import inspect
import json
import pickle
import pydoc
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import draftquant
import pytest
from draftquant import api as dq
from draftquant.quantize.files.hub import command_line
from draftquant.recipes import to_mapping
from draftquant.scripts.cli import main
from draftquant.scripts.frame import reports
from draftquant.validate.judging.judgement import GateReport
from test_packaging import project

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
    (folder / "TRACES").symlink_to(corpus.traces("eagle3-llama"))
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


def test_a_command_and_its_function_write_equal_bytes(work: Path) -> None:
    """But for the command line, which only the one of them has."""
    assert main(["quantize", "DRAFT", "--recipe", "int4-channel", "--out", "BY_COMMAND"]) == 0
    words = ("draftquant", "quantize", "DRAFT", "--recipe", "int4-channel", "--out", "BY_CALL")
    with command_line(words):
        report = dq.quantize("DRAFT", "int4-channel", work / "BY_CALL")
    assert report.out == work / "BY_CALL"
    folders = work / "BY_COMMAND", work / "BY_CALL"
    sides = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert sides[0] == sides[1]


def test_what_tools_ask_of_a_verb_is_there() -> None:
    """Options that are explained, types that resolve, `help()`, and pickling."""
    for name in dq.VERBS:
        function = getattr(dq, name)
        assert inspect.isfunction(function)
        parameters, text = inspect.signature(function).parameters, inspect.getdoc(function) or ""
        sections = (*(f"    {parameter}: " for parameter in parameters), "Returns:", "Raises:")
        assert [each for each in sections if f"\n{each}" not in text] == []
        assert not {"argv", "on_plan", "on_stage"} & set(parameters)
        hints = typing.get_type_hints(function)
        assert set(hints) == {*parameters, "return"}
        assert not any(isinstance(hint, str) for hint in hints.values())
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 (our own)
        assert text[0].isupper()
        assert text.splitlines()[0].endswith(".")
        shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
        assert shown.startswith(f"Python Library Documentation: function {name} in module draft")


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
    with pytest.raises(dq.DraftQuantError, match="name"):  # the extended recipe's is not its own
        dq.recipes_show({key: keys[key] for key in ("summary", "extends")})
    for name, given in {"BY_FILE": "mine.yaml", "BY_DICT": keys, "BY_RECIPE": recipe}.items():
        dq.quantize("DRAFT", given, name)
        assert dq.plan("DRAFT", given).plan.recipe == recipe
    recorded = [(work / name / "draftquant.json").read_bytes() for name in ("BY_FILE", "BY_DICT")]
    assert recorded[0] == recorded[1] == (work / "BY_RECIPE" / "draftquant.json").read_bytes()
    estimated = dq.estimate("DRAFT", recipes=[keys, "int4-channel", recipe], gpus="h200")
    assert list(estimated.loaded_by) == ["mine", "int4-channel"]
    assert capfd.readouterr() == ("", "")


def test_what_the_command_warns_of_is_a_python_warning_and_in_the_report(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = dq.quantize("DRAFT", "mi325x-w4a8", work / "WARNED", backend="torch")
    ours = [one for one in caught if one.category is dq.DraftQuantWarning]
    assert tuple(str(one.message) for one in ours) == report.warnings
    assert {one.filename for one in ours} == {__file__}  # where the caller's own line is
    assert report.warnings[0].startswith("no known engine loads what recipe mi325x-w4a8 makes")
    assert {one.verdict for one in report.loads} == {"REFUSED", "UNKNOWN"}  # TensorRT-LLM's
    for ask in (lambda: dq.inspect("TARGET"), lambda: dq.plan("TARGET", "fp8-ptpc")):
        with pytest.warns(dq.DraftQuantWarning, match=r"TARGET is a whole .* \(7.0 MB, 4 lay"):
            ask()
    with pytest.warns(dq.DraftQuantWarning) as of_gate:
        judged = dq.gate("DRAFT", "WARNED", "TRACES", policy="screening")
    assert tuple(str(one.message) for one in of_gate) == judged.warnings
    assert capsys.readouterr().err == ""
    command = ["quantize", "DRAFT", "--recipe", "fp8-ptpc", "--traces", "TRACES", "--out", "UNUSED"]
    assert main([*command, "--json"]) == 0
    assert "is not used" in " ".join(json.loads(capsys.readouterr().out)["warnings"])


WHOLE = to_mapping(dq.recipes_show("fp8-ptpc"))
RULES = [dict(WHOLE["rules"][0], action="quantise"), *WHOLE["rules"][1:]]
DRAFT, JUDGED = ("DRAFT", "int4-channel", "x"), ("DRAFT", "DRAFT", "TRACES")
MSE = {"scale": "mse", "rounding": "nearest"}
MISTAKES: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = (
    (dq.quantize, ("nowhere", "int4-channel", "x"), {}),
    (dq.quantize, ("DRAFT", "int4-chanel", "x"), {}),
    (dq.quantize, DRAFT, {"num_draft_tokens": "3"}),
    (dq.quantize, DRAFT, {"num_draft_tokens": True}),
    (dq.quantize, DRAFT, {"fix_config": "yes"}),
    (dq.quantize, DRAFT, {"target": 3}),
    (dq.quantize, DRAFT, {"input_scale": float("nan")}),
    (dq.estimate, (), {"gpu": "h200"}),
    (dq.check, ("OUT",), {"version": "1"}),
    (dq.gate, ("DRAFT",), {}),
    (dq.gate, JUDGED, {"policy": "mine"}),
    (dq.gate, JUDGED, {"max_relative_drop": "little"}),
    (dq.gate, (), {"measured": "A.json"}),
    (dq.gate, JUDGED, {"polcy": "release"}),
    (dq.check, ("OUT", "vllm"), {"arch": "h100"}),
    (dq.replay, ("DRAFT", "TRACES"), {"num_draft_tokens": 0}),
    (dq.vocab, ("DRAFT", "TRACES"), {"size": 3, "coverage": 0.5}),
    (dq.vocab, ("DRAFT", "TRACES"), {}),
    (dq.record, ("TARGET", "prompts.jsonl", "x"), {"engine": "sglang"}),
    # recipes of Python are read as strictly as files
    (dq.quantize, ("DRAFT", {**WHOLE, "rules": RULES}, "x"), {}),
    (dq.quantize, ("DRAFT", {**WHOLE, "wieghts": {}}, "x"), {}),
    (dq.quantize, ("DRAFT", {**WHOLE, "backend": "quark", "algorithm": MSE}, "x"), {}),
    (dq.plan, ("DRAFT", {**WHOLE, "layout": "fp9", "backend": "torsh"}), {}),
)


def test_mistakes_are_told_in_the_words_of_python(work: Path) -> None:
    for function, positional, named in MISTAKES:
        with pytest.raises((dq.DraftQuantError, TypeError)):
            function(*positional, **named)
    assert not (work / "x").exists()
    report = dq.gate("DRAFT", "DRAFT", "TRACES", unrelated=True, max_relative_drop="2%")  # type: ignore[arg-type]
    assert isinstance(report, GateReport)
    assert report.policy.max_relative_drop == 0.02
    assert main(["replay", "DRAFT", "--traces", "TRACES", "--batch-size", "0"]) == 2
