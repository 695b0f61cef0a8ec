"""What backends are not asked for: refusals say why, in recipes, in code, on the command line."""

import itertools
import typing
from pathlib import Path

import pytest
from draftquant.quantize.backends import get_backend
from draftquant.recipes import Algorithm, RecipeError, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.library import RecipeFileError
from draftquant.recipes.schema import BackendName, RoundingChoice, ScaleChoice
from draftquant.recipes.schemes import REFUSED, named_algorithm, refusal
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama

BACKENDS = typing.get_args(BackendName)
OWN = {*typing.get_args(ScaleChoice), *typing.get_args(RoundingChoice)}
FOREIGN = sorted({name for _, name in REFUSED if not set(name.split()) & OWN})
CARRIED = {
    "quark": {("absmax", "nearest"), ("absmax", "gptq")},
    "modelopt": {("absmax", "nearest"), ("mse", "nearest"), ("absmax", "gptq")},
    "torch": set(itertools.product(typing.get_args(ScaleChoice), typing.get_args(RoundingChoice))),
}
COMBINATIONS = list(
    itertools.product(BACKENDS, typing.get_args(ScaleChoice), typing.get_args(RoundingChoice))
)


def test_vendors_names_are_refused_by_every_backend() -> None:
    assert FOREIGN == ["awq", "smoothquant", "svdquant"]
    assert {(backend, name) for backend in BACKENDS for name in FOREIGN} <= REFUSED.keys()


def test_every_combination_is_carried_or_refused_with_a_reason() -> None:
    for backend, scale, rounding in COMBINATIONS:
        algorithm = Algorithm(scale=scale, rounding=rounding)
        if (scale, rounding) in CARRIED[backend]:
            assert refusal(backend, algorithm) is None
            assert get_backend(backend, algorithm).name == backend
            continue
        with pytest.raises(BackendError) as caught:
            get_backend(backend, algorithm)
        assert caught.value.where == f"backend {backend}, scale {scale}, rounding {rounding}"
        refused = refusal(backend, algorithm)
        assert refused is not None
        assert (caught.value.what, caught.value.fix) == (refused.reason, refused.fix)


def test_gptq_of_vendors_takes_their_own_scales() -> None:
    assert named_algorithm("gptq", "torch") == ("mse", "gptq")
    assert named_algorithm("gptq", "quark") == ("absmax", "gptq")
    assert named_algorithm("gptq", "modelopt") == ("absmax", "gptq")


def test_an_unknown_name_is_no_refusal() -> None:
    with pytest.raises(RecipeError, match="no algorithm is called 'gtpq'") as caught:
        named_algorithm("gtpq", "quark")
    assert caught.value.fix == "did you mean 'gptq'?"


# ---- in a recipe


def recipe(folder: Path, backend: str, algorithm: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(
        f"extends: int4-channel\nname: mine\nbackend: {backend}\nalgorithm: {algorithm}\n",
        encoding="utf-8",
    )
    return path


def test_a_recipe_that_names_one_is_told_why(tmp_path: Path) -> None:
    others = {"scale": "rounding: nearest", "rounding": "scale: absmax"}
    for (key, other), backend, name in itertools.product(others.items(), BACKENDS, FOREIGN):
        with pytest.raises(RecipeFileError) as caught:
            load_recipe(recipe(tmp_path, backend, f"{{{other}, {key}: {name}}}"))
        (problem,) = caught.value.problems
        refused = REFUSED[backend, name]
        assert problem.line == 4
        assert problem.what == f"algorithm.{key}: backend {backend}: {refused.reason}"
        assert problem.fix == refused.fix


def test_every_problem_of_the_file_is_still_told(tmp_path: Path) -> None:
    path = recipe(tmp_path, "quark", "{scale: awq, rounding: 7, balance: auto}")
    with pytest.raises(RecipeFileError) as caught:
        load_recipe(path)
    said = [problem.what for problem in caught.value.problems]
    assert len(said) == 3
    assert any("two norms side by side" in what for what in said)
    assert any("rounding: expected one of" in what for what in said)
    assert any("balance: unknown key" in what for what in said)


@pytest.mark.parametrize("backend", ["[quark]", "amd"])
def test_a_backend_that_is_none_hides_no_other_problem(backend: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeFileError) as caught:
        load_recipe(recipe(tmp_path, backend, "{scale: awq, rounding: nearest}"))
    whats = " ".join(problem.what for problem in caught.value.problems)
    assert "scale: expected one of 'absmax', 'mse', got 'awq'" in whats


def test_what_a_backend_does_not_carry_is_told_with_the_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, "quark", "{scale: mse, rounding: gptq}")
    with pytest.raises(RecipeFileError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (str(path), 4)
    assert "scale mse, rounding gptq: this toolkit's GPTQ always takes absmax" in problem.what
    assert "scale: absmax" in problem.fix


def test_a_backend_changed_by_extending_is_judged_with_what_it_extends(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: blackwell-nvfp4\nname: mine\nbackend: modelopt\nalgorithm: {rounding: learned}\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeFileError, match="only draftquant's own backend"):
        load_recipe(path)


# ---- on the command line


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int4-channel", "--algorithm", "awq"), ("backend torch", "does not implement", "gptq")),
        (
            ("int4-channel", "--algorithm", "awq", "--backend", "quark"),
            ("two norms side by side", "use --algorithm gptq or --algorithm learned"),
        ),
        (
            ("blackwell-fp8", "--algorithm", "svdquant", "--backend", "modelopt"),
            ("low-rank part", "use --algorithm gptq or --algorithm learned"),
        ),
        (
            ("int4-channel-gptq", "--backend", "quark"),
            ("recipe int4-channel-gptq: backend quark", "absmax scales", "--algorithm gptq"),
        ),
        (("int4-channel", "--algorithm", "msee"), ("no algorithm is called", "'mse'?")),
    ],
)
def test_the_command_line_says_why(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    draft: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(draft), "--recipe", *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words), said


def test_backend_and_algorithm_choose_the_vendors_own(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", "mi325x-w4a8", "--algorithm", "gptq", "--backend", "quark")
    assert main(["plan", str(draft), *arguments]) == 0
    assert "backend quark" in " ".join(capsys.readouterr().out.split())
