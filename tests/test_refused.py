"""What backends are not asked for: refusals say why, in recipes, in code, on the command line."""

import itertools
import typing
from collections.abc import Sequence
from pathlib import Path

import corpus
import pytest
from draftquant.quantize.backends import get_backend
from draftquant.recipes import Algorithm, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.library import Problem, RecipeFileError
from draftquant.recipes.schema import BackendName, RoundingChoice, ScaleChoice
from draftquant.recipes.schemes import refusal
from draftquant.scripts.cli import main

BACKENDS = typing.get_args(BackendName)
CARRIED = {
    "quark": {("absmax", "nearest"), ("absmax", "gptq")},
    "modelopt": {("absmax", "nearest"), ("mse", "nearest"), ("absmax", "gptq")},
    "torch": set(itertools.product(typing.get_args(ScaleChoice), typing.get_args(RoundingChoice))),
}
COMBINATIONS = list(
    itertools.product(BACKENDS, typing.get_args(ScaleChoice), typing.get_args(RoundingChoice))
)


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


def problems(folder: Path, backend: str, algorithm: str) -> Sequence[Problem]:
    path = folder / "mine.yaml"
    keys = f"extends: int4-channel\nname: mine\nbackend: {backend}\nalgorithm: {algorithm}\n"
    path.write_text(keys, encoding="utf-8")
    with pytest.raises(RecipeFileError) as caught:
        load_recipe(path)
    return caught.value.problems


@pytest.mark.parametrize(
    ("backend", "algorithm", "said"),
    [
        ("quark", "{scale: awq, rounding: 7, balance: auto}",
         ["two norms side by side", "rounding: expected one of", "balance: unknown key"]),
        ("[quark]", "{scale: awq, rounding: nearest}",
         ["backend: ", "scale: expected one of 'absmax', 'mse', got 'awq'"]),
        ("quark", "{scale: mse, rounding: gptq}", ["this toolkit's GPTQ always takes absmax"]),
        ("modelopt", "{rounding: learned}", ["only draftquant's own backend"]),
    ],
)  # fmt: skip
def test_every_problem_of_the_file_is_told(
    backend: str, algorithm: str, said: list[str], tmp_path: Path
) -> None:
    found = problems(tmp_path, backend, algorithm)
    assert len(found) == len(said)
    assert all(any(words in problem.what for problem in found) for words in said)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("int4-channel --algorithm awq", 2, ("backend torch", "does not implement", "gptq")),
        ("int4-channel --algorithm awq --backend quark", 2,
         ("two norms side by side", "use --algorithm gptq or --algorithm learned")),
        ("int4-channel-gptq --backend quark", 2,
         ("recipe int4-channel-gptq: backend quark", "absmax scales", "--algorithm gptq")),
        ("int4-channel --algorithm msee", 2, ("no algorithm is called", "'mse'?")),
        ("mi325x-w4a8 --algorithm gptq --backend quark", 0, ("backend quark",)),
    ],
)  # fmt: skip
def test_the_command_line_says_why(
    arguments: str, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", str(corpus.draft("eagle3-llama")), "--recipe", *arguments.split()]
    assert main(plan) == code
    said = " ".join("".join(capsys.readouterr()).split())
    assert all(word in said for word in words), said
