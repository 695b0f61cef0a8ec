"""`verify` of whole folders: declarations, files, headers, and one changed tensor."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draftquant.quantize.making.execute as executing
import numpy as np
import pytest
from draftquant.quantize.files.provenance import Method
from draftquant.quantize.verify import scales, verify
from draftquant.recipes import ActivationFormat, Algorithm, Recipe, WeightFormat, load_recipe
from draftquant.recipes.errors import CheckpointError, VerifyError
from tiny import Stored, config_of, edit_json, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import (
    ACTIVATIONS,
    ATTENTION,
    Copy,
    Q,
    Tensors,
    assert_only_fault,
    copy_of,
    edit,
    edit_declaration,
    faults_of,
    flip_bit,
    made,
    method_of,
    quantized,
    set_scale,
    source,
)
from weight_formats import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT4, INT4_GROUPS, MXFP4, NVFP4

__all__ = ["copy_of", "made", "source"]  # fixtures


@pytest.mark.parametrize(
    ("stored", "declared"), [("quark-int4", "quark-fp8"), ("ct-fp8", "ct-fp8-static")]
)
def test_a_config_that_declares_another_scheme(
    copy_of: Copy, made: Copy, source: Path, stored: str, declared: str
) -> None:
    out = copy_of(stored)
    shutil.copy(made(declared) / "config.json", out / "config.json")
    assert Q in faults_of(verify(out, source, foreign=True))


@pytest.mark.parametrize(
    ("name", "patterns", "missing", "of_ours"),
    [
        ("quark-int4", ["model.fc", "lm_head", "re:.*embed_tokens$"], ["fc"], ["fc"]),
        ("ct-int4", ["fc", "lm_head", "re:.*embed_tokens$"], ["model.fc"], ["model.fc"]),
        # a head by the rules of these two, and an embedding, which is no linear
        ("quark-int4", ["re:.*fc$", "re:.*embed_tokens$"], [], ["lm_head"]),
        ("ct-int4", ["re:.*fc$", "lm_head"], [], ["embed_tokens", "model.embed_tokens"]),
    ],
)
def test_excludes_that_miss_a_kept_module(
    copy_of: Copy,
    source: Path,
    name: str,
    patterns: list[str],
    missing: list[str],
    of_ours: list[str],
) -> None:
    out, key = copy_of(name), "exclude" if name == "quark-int4" else "ignore"
    edit_declaration(out, lambda d: d.update({key: patterns}))
    faults = verify(out, source, foreign=True).faults
    assert [fault.where for fault in faults] == [f"config.json: {m}" for m in missing]
    assert all("expected excluded: it is kept" in str(fault) for fault in faults)
    ours = verify(out, source, method=method_of(out)).faults  # this package lists them all
    found = [fault.where for fault in ours if fault.expected == "excluded: it is kept"]
    assert found == [f"config.json: {m}" for m in of_ours]


def test_a_change_inside_a_section_is_that_of_the_run(copy_of: Copy, source: Path) -> None:
    out = copy_of("ct-int4")
    edit_json(out / "config.json", eagle_config=config_of(out)["eagle_config"] | {"note": 1})
    for note in (1, 2):
        changes = {"eagle_config.note": note}
        faults = verify(out, source, method=method_of(out), config_changes=changes).faults
        assert [fault.where for fault in faults] == ["config.json: eagle_config"] * (note - 1)


def test_keys_that_change_drafts_only_together(copy_of: Copy, source: Path, tmp_path: Path) -> None:
    """The first of two sections counts, unless it is empty."""
    out, both = copy_of("ct-int4"), Path(shutil.copytree(source, tmp_path / "both"))
    rope = {"rope_type": "linear", "factor": 2.0}
    edit_json(both / "config.json", rope_scaling=rope, rope_parameters=rope)
    for first, wrong in ((rope, []), (None, ["rope_parameters", "rope_scaling"])):
        edit_json(out / "config.json", rope_scaling=first, rope_parameters=rope | {"factor": 4.0})
        faults = verify(out, both, foreign=True).faults
        assert [fault.where for fault in faults] == [f"config.json: {key}" for key in wrong]


def put(name: str, change: Callable[[Stored], Stored]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


SCALE = f"{Q}.weight_scale"


def test_what_is_stored_is_not_what_is_declared(copy_of: Copy, source: Path) -> None:
    out = copy_of("quark-int4-static")
    edit_declaration(out, lambda d: d["global_quant_config"].update(input_tensors=None))
    found = faults_of(verify(out, source, foreign=True))
    assert found.count("input_scale: expected no such tensor") == 7
    edit_json(out / "config.json", quantization_config=None)
    found = faults_of(verify(out, source, foreign=True))
    assert found.count("config.json declares no quantization, got a quantized weight") == 7


def test_a_source_without_numbers_is_a_fault_of_what_was_not_compared(
    copy_of: Copy, source: Path, tmp_path: Path
) -> None:
    broken, out = Path(shutil.copytree(source, tmp_path / "broken")), copy_of("ct-int4")
    edit(broken, put("fc.weight", lambda tensor: set_scale(tensor, math.nan)))
    edit(out, lambda tensors: tensors.pop("fc.weight"))
    found = faults_of(verify(out, broken, foreign=True))
    assert "fc.weight: expected finite numbers, got NaN or infinity in 1 of 12,288 values" in found


def test_wide_scales_of_quark(copy_of: Copy, source: Path) -> None:
    """Quark 0.13 from file to file stores scales in F32, a folder of ours never does."""
    out = copy_of("quark-int4")
    edit(out, put(SCALE, lambda t: store(values_of(t), "F32")))
    assert verify(out, source, foreign=True).ok
    faults = verify(out, source, method=method_of(out)).faults
    assert "expected BF16 [64] (quark int4" in {f.where: str(f) for f in faults}[SCALE]


def test_folders_that_are_no_input(made: Copy, source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for out, against, foreign in (
        (tmp_path / "empty", source, True), (copy, source, False),
        (made("quark-int4"), tmp_path / "absent", True),
        (made("quark-fp8"), made("quark-fp8"), True),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            verify(out, against, foreign=foreign)


# ---- folders of ours, to the last bit


O = f"{ATTENTION}o_proj"  # noqa: E741 - not fused with anything
TOKEN, TENSOR = ACTIVATIONS["token-dynamic"], ACTIVATIONS["tensor-static"]
CASES: dict[str, tuple[Any, WeightFormat, ActivationFormat | None]] = {
    "quark-int4": ("quark", INT4, None),
    "quark-two-stages": ("quark", replace(INT4, first_stage="fp8_e4m3"), TOKEN),
    "ct-int4": ("compressed-tensors", INT4, None),
    "ct-int4-group": ("compressed-tensors", INT4_GROUPS, None),
    "ct-int4-f16": ("compressed-tensors", replace(INT4_GROUPS, scale_dtype="float16"), None),
    "ct-fp8": ("compressed-tensors", FP8_CHANNEL, TOKEN),
    "ct-mxfp4": ("compressed-tensors", MXFP4, None),
    "modelopt-fp8": ("modelopt", FP8_TENSOR, TENSOR),
    "modelopt-nvfp4": ("modelopt", NVFP4, ACTIVATIONS["nvfp4"]),
    "fp8-block": ("fp8", FP8_BLOCK, ACTIVATIONS["group-dynamic"]),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that are no whole blocks, a weight with zero rows and groups, and one of zeros."""
    folder = tiny_eagle3_llama(
        tmp_path_factory.mktemp("exact") / "source", hidden=128, intermediate=256, heads=8
    )

    def zeros(tensors: Tensors) -> None:
        values = values_of(tensors[f"{O}.weight"]).copy()
        values[3] = 0
        values[:, 32:64] = 0
        values[5, 7], values[6, 8] = -0.0, -1e-30  # signs of zero, and of what rounds to it
        tensors[f"{O}.weight"] = store(values, "BF16")
        nothing = 0 * values_of(tensors["midlayer.mlp.down_proj.weight"])
        tensors["midlayer.mlp.down_proj.weight"] = store(nothing, "BF16")

    edit(folder, zeros)
    return folder


def recipe_of(name: str, algorithm: Algorithm | None = None) -> Recipe:
    layout, chosen, inputs = CASES[name]
    base = load_recipe("fp8-ptpc")
    base = replace(base, layout=layout, weights=chosen, activations=inputs)
    return replace(base, algorithm=algorithm or base.algorithm)


def run(odd: Path, out: Path, recipe: Recipe) -> Method:
    """Quantize, and forget what was recorded."""
    method = quantized(odd, out, recipe, scale=0.3, allow_zero_rows=True)
    (out / "draftquant.json").unlink()
    return method


Made = Callable[..., tuple[Path, Method]]


@pytest.fixture
def exact(odd: Path, tmp_path: Path) -> Made:
    """A correct folder."""

    def make(name: str, algorithm: Algorithm | None = None) -> tuple[Path, Method]:
        out = tmp_path / name
        return out, run(odd, out, recipe_of(name, algorithm))

    return make


@pytest.mark.parametrize(("name", "dtype"), [("fp8-block", "F32"), ("ct-int4", "F16")])
def test_other_dtypes_and_blocks_at_the_edge(name: str, dtype: str, tmp_path: Path) -> None:
    odd = tiny_eagle3_llama(tmp_path / "source", hidden=72, intermediate=200, dtype=dtype)
    method = run(odd, tmp_path / "out", recipe_of(name))
    assert verify(tmp_path / "out", odd, method=method).faults == ()


def test_a_run_without_the_scale_of_a_linear(exact: Made, odd: Path) -> None:
    out, method = exact("modelopt-fp8")
    scales = {module: scale for module, scale in method.input_scales.items() if module != O}
    report = verify(out, odd, method=replace(method, input_scales=scales))
    assert_only_fault(report, "draftquant.json: input_scales", f"expected one of {O}, got none")
    out, method = exact("ct-fp8")
    report = verify(out, odd, method=replace(method, input_scales={O: 1.0}))
    assert_only_fault(report, "draftquant.json: input_scales", f"expected none (recipe), got {O}")


def test_the_pipeline_hands_its_own_scales_to_verify(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that stores other input scales than the run was given: nothing is published."""
    execute = executing.execute

    def wrong(*arguments: Any, measured: Any, **options: Any) -> None:
        thousandfold = {m: 1000 * scale for m, scale in measured.input_scales.items()}
        execute(*arguments, measured=replace(measured, input_scales=thousandfold), **options)

    monkeypatch.setattr(executing, "execute", wrong)
    with pytest.raises(VerifyError, match=r"input_scale: expected 0\.3.*that of the run"):
        run(odd, tmp_path / "out", recipe_of("modelopt-fp8"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ct-fp8", "modelopt-nvfp4", "ct-mxfp4"])
def test_the_sign_of_a_zero(exact: Made, odd: Path, name: str) -> None:
    out, method = exact(name)
    stored = read_tensors(out)
    key = next(f"{O}.{s}" for s in ("weight_packed", "weight") if f"{O}.{s}" in stored)
    width = len(stored[key].data) // stored[key].shape[0]
    at = 8 * (5 * width + 40 * width // 128)  # in a column of zeros
    for bit in (7,) if name == "ct-fp8" else (3, 7):
        edit(out, lambda t, bit=bit: t.update({key: flip_bit(stored[key], at + bit)}))
        assert_only_fault(verify(out, odd, method=method), key, "1 other(s), first at row 5")


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("ct-int4", "quark-int4", "layout quark"),
        ("ct-int4", "ct-int4-group", "granularity group"),
        ("ct-int4-group", "ct-int4-f16", "expected F16"),
        ("quark-int4", "quark-two-stages", "first stage fp8_e4m3"),
    ],
)
def test_a_folder_that_is_not_what_its_recipe_says(
    exact: Made, odd: Path, name: str, other: str, words: str
) -> None:
    out, method = exact(name)
    assert words in faults_of(verify(out, odd, method=replace(method, recipe=recipe_of(other))))


def test_a_folder_that_declares_nothing_and_one_of_other_groups(exact: Made, odd: Path) -> None:
    out, method = exact("ct-int4-group")
    wide = replace(method.recipe, weights=replace(INT4_GROUPS, group_size=64))
    assert not verify(out, odd, method=replace(method, recipe=wide)).ok
    assert not verify(odd, odd, method=method).ok


def test_what_the_recipe_keeps_and_the_dtype_of_its_scales(exact: Made, odd: Path) -> None:
    out, method = exact("ct-fp8")
    keep = replace(method.recipe.rules[0], role=(), tensor=("*.o_proj.weight",), action="keep")
    recipe = replace(method.recipe, rules=(*method.recipe.rules, keep))
    report = verify(out, odd, method=replace(method, recipe=recipe))
    assert_only_fault(report, O, "expected kept (recipe fp8-ptpc), got quantized")
    key = f"{O}.weight_scale"
    edit(out, lambda t: t.update({key: store(values_of(t[key]), "BF16")}))
    assert key not in {fault.where for fault in verify(out, odd, foreign=True).faults}
    assert_only_fault(verify(out, odd, method=method), key, "expected F32 [128, 1]")


def compensated(method: Method) -> Method:
    """The same run by an algorithm whose codes do not follow from the weight alone."""
    changed: Any = replace(method.recipe.algorithm, rounding="gptq")  # type: ignore[arg-type]
    return replace(method, recipe=replace(method.recipe, algorithm=changed))


def test_codes_that_make_up_for_others_need_only_be_near(
    exact: Made, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, method = exact("ct-fp8")
    key = f"{O}.weight"
    edit(out, lambda t: t.update({key: flip_bit(t[key], 8 * 50 + 1)}))
    assert not verify(out, odd, method=method).ok
    report = verify(out, odd, method=compensated(method))
    assert report.faults == ()
    errors = [linear.relative_l2_error for linear in report.linears]
    assert [error for error in sorted(errors) if error < 0.01] == [0.0]  # of the one of zeros
    nan = read_tensors(out)[key]
    data = nan.data[:300] + b"\x7f" + nan.data[301:]
    edit(out, lambda t: t.update({key: nan._replace(data=data)}))
    report = verify(out, odd, method=compensated(method))
    assert_only_fault(report, key, "1 NaN(s), first at row 2, column 44")
    width = nan.shape[1]
    for rows, got in ((slice(5 * width, 6 * width), "in row 5"), (slice(None), "times")):
        far = np.frombuffer(nan.data, np.uint8).copy()
        far[rows] ^= 0x80  # the sign
        far = nan._replace(data=far.tobytes())
        edit(out, lambda t, far=far: t.update({key: far}))
        report = verify(out, odd, method=compensated(method))
        assert_only_fault(report, key, got)
        assert "times the error of the nearest" in str(report.faults[0])
        assert ("in row" in str(report.faults[0])) == (got != "times")
    scale = f"{O}.weight_scale"
    edit(out, lambda t: t.update({scale: store(-values_of(t[scale]), "F32")}))
    assert scale in {f.where for f in verify(out, odd, method=compensated(method)).faults}
    edit(out, lambda t: t.update({scale: store(-2 * values_of(t[scale]), "F32")}))
    monkeypatch.setattr(scales, "_SCALES", 50)  # of each block
    assert "got 128 other(s), first" in faults_of(verify(out, odd, method=compensated(method)))


def test_an_algorithm_that_is_not_known(exact: Made, odd: Path) -> None:
    out, method = exact("ct-fp8")
    algorithm: Any = replace(method.recipe.algorithm, rounding="guess")  # type: ignore[arg-type]
    unknown = replace(method, recipe=replace(method.recipe, algorithm=algorithm))
    with pytest.raises(VerifyError, match="rounding 'guess'"):
        scales.rule_of(unknown)
    report = verify(out, odd, method=unknown)
    assert_only_fault(report, "recipe.algorithm", "what its codes must be is not known")
    assert scales.rule_of(None) == scales.FOREIGN
