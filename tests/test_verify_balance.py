"""`verify` of balanced drafts: that change of one norm, the columns behind it, and nothing else."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from draftquant.quantize.files.provenance import Method
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, Recipe, load_recipe
from test_balance import CONCAT, NORM, unbalanced
from tiny import read_tensors
from tiny_dflash import tiny_dflash
from verify_cases import assert_only_fault, edit, faults_of, flip_bit, quantized
from weight_formats import TWO_STAGES

OTHER_NORM = "midlayer.hidden_norm.weight"
AUTO = Algorithm(scale="absmax", rounding="nearest", balance_concat="auto")
RECIPES = {
    "int4": load_recipe("int4-channel"),
    "fp8": replace(load_recipe("fp8-ptpc"), algorithm=AUTO),
    "fp8-tensor": replace(load_recipe("blackwell-fp8"), backend="torch", algorithm=AUTO),
    "nvfp4": replace(
        load_recipe("blackwell-nvfp4"), backend="torch", layout="compressed-tensors", algorithm=AUTO
    ),
    "two-stages": replace(load_recipe("mi325x-w4a8"), backend="torch", weights=TWO_STAGES),
    "mse": replace(load_recipe("int4-channel"), algorithm=replace(AUTO, scale="mse")),
}


def run(source: Path, out: Path, recipe: Recipe) -> Method:
    """Quantize, and forget what was recorded."""
    method = quantized(source, out, recipe)
    (out / "draftquant.json").unlink()
    return method


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unbalanced(tmp_path_factory.mktemp("balance") / "source", "llama", 1 / 16)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Method]:
    out = tmp_path_factory.mktemp("made") / "out"
    return out, run(source, out, RECIPES["int4"])


FACTORS = ((1 / 16, 4), (16, -4), (1, None))


@pytest.mark.parametrize(
    ("recipe", "family", "factor", "k"),
    [(name, ("llama", "mla")[i // 3], *FACTORS[i % 3]) for i, name in enumerate(RECIPES)],
)
def test_what_is_written_is_exact(
    recipe: str, family: str, factor: float, k: int | None, tmp_path: Path
) -> None:
    source = unbalanced(tmp_path / "source", family, factor)
    method = run(source, tmp_path / "out", RECIPES[recipe])
    assert method.balanced == ({NORM: k} if k else {})
    assert verify(tmp_path / "out", source, method=method).faults == ()


def test_one_bit_of_the_norm(made: tuple[Path, Method], source: Path, tmp_path: Path) -> None:
    """The sign too."""
    copy = Path(shutil.copytree(made[0], tmp_path / "copy"))
    right = read_tensors(copy)
    for bit in (0, 15, 16 * 63 + 3):
        edit(copy, lambda t, bit=bit: t.update({NORM: flip_bit(right[NORM], bit)}))
        report = verify(copy, source, method=made[1])
        assert_only_fault(report, NORM, "expected the source's values / 2^4, got 1 other(s), first")
        assert f"at {bit // 16}" in str(report.faults[0])


ON_RECORD = [*({NORM: p} for p in (3, -4, 0, 127)), {OTHER_NORM: 4}, {NORM: 4, OTHER_NORM: 4}]


@pytest.mark.parametrize("balanced", ON_RECORD)
def test_another_power_or_tensor_on_record(
    balanced: dict[str, int], made: tuple[Path, Method], source: Path
) -> None:
    """Norm and weights are both held against it; what is found is kept in told."""
    out, method = made
    found = faults_of(verify(out, source, method=replace(method, balanced=balanced)))
    assert f"{NORM}: expected the source's" in found


def test_a_recipe_that_does_not_balance(made: tuple[Path, Method], source: Path) -> None:
    out, method = made
    off = replace(method.recipe, algorithm=replace(AUTO, balance_concat="off"))
    found = faults_of(verify(out, source, method=replace(method, recipe=off)))
    assert "balanced: expected none: the recipe says balance_concat: off, got" in found


def test_a_linear_behind_the_norm_that_is_kept(source: Path, tmp_path: Path) -> None:
    """Then the norm must not change: what is kept reads it as it was."""
    recipe = RECIPES["fp8"]
    names = tuple(f"*.self_attn.{leaf}.weight" for leaf in CONCAT["llama"])
    keep = replace(recipe.rules[0], role=(), tensor=names, action="keep", why="for the test")
    fewer = replace(recipe.expect, quantized_per_layer=4)
    recipe = replace(recipe, rules=(*recipe.rules, keep), expect=fewer)
    method = run(source, tmp_path / "out", recipe)
    assert method.balanced == {}
    assert verify(tmp_path / "out", source, method=method).ok
    assert not verify(tmp_path / "out", source, method=replace(method, balanced={NORM: 4})).ok


def test_a_draft_without_a_concat_input(tmp_path: Path) -> None:
    source = tiny_dflash(tmp_path / "source")
    method = replace(run(source, tmp_path / "out", RECIPES["int4"]), balanced={NORM: 2})
    report = verify(tmp_path / "out", source, method=method)
    assert_only_fault(report, "balanced", "expected none: drafts of dflash have no concat input")
