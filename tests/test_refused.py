"""What backends are not asked for: refusals say why, in recipes, in code, on the command line."""

import itertools
import typing
from pathlib import Path

import corpus
import pytest
from draftquant.quantize.backends import get_backend
from draftquant.recipes import Algorithm, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.library import RecipeFileError
from draftquant.recipes.schema import BackendName, RoundingChoice, ScaleChoice
from draftquant.recipes.schemes import refusal
from draftquant.scripts.cli import main


def test_every_combination_is_carried_or_refused_with_a_reason() -> None:
    """Which are refused stands in told/combinations.txt."""
    choices = map(typing.get_args, (BackendName, ScaleChoice, RoundingChoice))
    for backend, scale, rounding in itertools.product(*choices):
        algorithm = Algorithm(scale=scale, rounding=rounding)
        refused = refusal(backend, algorithm)
        if refused is None:
            assert get_backend(backend, algorithm).name == backend
            continue
        with pytest.raises(BackendError) as caught:
            get_backend(backend, algorithm)
        assert caught.value.where == f"backend {backend}, scale {scale}, rounding {rounding}"
        assert (caught.value.what, caught.value.fix) == (refused.reason, refused.fix)


FILES = (
    ("quark", "{scale: awq, rounding: 7, balance: auto}"),
    ("[quark]", "{scale: awq, rounding: nearest}"),
    ("quark", "{scale: mse, rounding: gptq}"),
    ("modelopt", "{rounding: learned}"),
)


def test_every_problem_of_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for backend, algorithm in FILES:
        keys = f"extends: int4-channel\nname: mine\nbackend: {backend}\nalgorithm: {algorithm}\n"
        path.write_text(keys, encoding="utf-8")
        with pytest.raises(RecipeFileError):
            load_recipe(path)


COMMANDS = {
    "int4-channel --algorithm awq": 2,
    "int4-channel --algorithm awq --backend quark": 2,
    "int4-channel-gptq --backend quark": 2,
    "int4-channel --algorithm msee": 2,
    "mi325x-w4a8 --algorithm gptq --backend quark": 0,
}


def test_the_command_line_says_why() -> None:
    for words, code in COMMANDS.items():
        plan = ["plan", str(corpus.draft("eagle3-llama")), "--recipe", *words.split()]
        assert (words, main(plan)) == (words, code)
