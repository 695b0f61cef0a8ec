"""`verify` of tensors: every way in which one can be wrong is found and named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from draftquant.quantize.verify import verify
from handmade import MADE, encode, quantize_by_hand
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import (
    ATTENTION,
    FP8,
    INT4,
    STATIC,
    Q,
    Tensors,
    assert_only_fault,
    edit,
    edit_declaration,
    faults_of,
    flip_bit,
    provenance_of,
    set_scale,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("verify") / "source", pruned_vocabulary=True)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One correct folder per layout; tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    return {name: quantize_by_hand(source, folder / name, how) for name, how in MADE.items()}


@pytest.fixture
def copy_of(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(made[name], tmp_path / name))

    return copy


# ---- kept tensors and names


@pytest.mark.parametrize(
    "tensor", ["fc.weight", "norm.weight", "embed_tokens.weight", "d2t", "t2d"]
)
@pytest.mark.parametrize("bit", [0, 77])
def test_one_bit_of_a_kept_tensor(
    copy_of: Callable[[str], Path], source: Path, tensor: str, bit: int
) -> None:
    out = copy_of("quark-int4")
    edit(out, lambda t: t.__setitem__(tensor, flip_bit(t[tensor], bit)))
    report = verify(out, source, foreign=True)
    assert_only_fault(report, tensor, f"1 different byte(s), first at byte {bit // 8}")
    assert report.output_digests[tensor] != report.source_digests[tensor]


@pytest.mark.parametrize("name", ["quark-int4", "ct-int4", "modelopt-fp8"])
def test_a_stray_tensor(copy_of: Callable[[str], Path], source: Path, name: str) -> None:
    out = copy_of(name)
    edit(out, lambda t: t.__setitem__("extra.weight", t["norm.weight"]))
    assert_only_fault(verify(out, source, foreign=True), "extra.weight", "expected no such tensor")


@pytest.mark.parametrize("tensor", ["fc.weight", "d2t", f"{ATTENTION}o_proj.weight"])
def test_a_missing_tensor(copy_of: Callable[[str], Path], source: Path, tensor: str) -> None:
    out = copy_of("quark-fp8")
    edit(out, lambda t: t.pop(tensor))
    assert_only_fault(verify(out, source, foreign=True), tensor, "got none")


@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight"])
def test_a_kept_tensor_of_another_shape(
    copy_of: Callable[[str], Path], source: Path, name: str
) -> None:
    """The same bytes, rows and columns exchanged."""
    out = copy_of("quark-int4")
    rows, columns = read_tensors(source)[name].shape
    edit(out, lambda t: t.__setitem__(name, t[name]._replace(shape=(columns, rows))))
    what = f"expected BF16 [{rows}, {columns}] (kept), got BF16 [{columns}, {rows}]"
    assert_only_fault(verify(out, source, foreign=True), name, what)


# ---- what may be quantized


@pytest.mark.parametrize("name", ["quark-int4", "ct-int4", "ct-fp8", "modelopt-fp8"])
@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("fc", "expected not excluded: it is quantized"),
        ("lm_head", "expected not excluded: it is quantized"),
        ("embed_tokens", "is never quantized, got a quantized weight"),
    ],
)
def test_a_module_that_is_not_declared_as_quantized_or_must_never_be(
    copy_of: Callable[[str], Path], source: Path, name: str, module: str, said: str
) -> None:
    """Even with right codes."""
    out = copy_of(name)

    def quantize(tensors: Tensors) -> None:
        tensors |= encode(module, tensors.pop(f"{module}.weight"), MADE[name], 0.05)

    edit(out, quantize)
    report = verify(out, source, foreign=True)
    assert module in faults_of(report)
    assert said in faults_of(report)


def test_part_of_a_fused_group(copy_of: Callable[[str], Path], source: Path) -> None:
    out, original = copy_of("ct-fp8"), read_tensors(source)

    def keep(tensors: Tensors) -> None:
        del tensors[f"{ATTENTION}k_proj.weight_scale"]
        tensors[f"{ATTENTION}k_proj.weight"] = original[f"{ATTENTION}k_proj.weight"]

    edit(out, keep)
    found = faults_of(verify(out, source, foreign=True))
    assert "expected all or none of them quantized, got kept: midlayer.self_attn.k_proj" in found
    assert "config.json: midlayer.self_attn.k_proj: expected excluded: it is kept" in found


def test_quantized_tensors_without_a_declaration(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("quark-int4")
    edit_json(out / "config.json", quantization_config=None)
    report = verify(out, source, foreign=True)
    assert len(report.faults) == 7
    assert "config.json declares no quantization, got a quantized weight" in faults_of(report)


# ---- codes and scales


@pytest.mark.parametrize("name", [*INT4, *FP8])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -0.5])
def test_a_scale_that_is_no_scale(
    copy_of: Callable[[str], Path], source: Path, name: str, value: float
) -> None:
    out = copy_of(name)
    key = f"{Q}.weight_scale"
    edit(out, lambda t: t.__setitem__(key, set_scale(t[key], value)))
    report = verify(out, source, foreign=True)
    if name.startswith("ct-int4") and value < 0:  # may be negative there, but not of this size
        assert {fault.where for fault in report.faults} == {key, f"{Q}.weight_packed"}
        return
    assert_only_fault(report, key, f"1 other(s), first {value} at row 0")


def test_an_int4_scale_below_the_smallest(copy_of: Callable[[str], Path], source: Path) -> None:
    out, key = copy_of("quark-int4"), f"{Q}.weight_scale"
    edit(out, lambda t: t.__setitem__(key, set_scale(t[key], 2.0**-24)))
    assert_only_fault(
        verify(out, source, foreign=True), key, "finite scales > 0 and >= 1.1920928955078125e-07"
    )


@pytest.mark.parametrize("name", [*INT4, *FP8])
def test_a_missing_scale(copy_of: Callable[[str], Path], source: Path, name: str) -> None:
    out = copy_of(name)
    edit(out, lambda t: t.pop(f"{Q}.weight_scale"))
    assert_only_fault(verify(out, source, foreign=True), f"{Q}.weight_scale", "got none")


@pytest.mark.parametrize(
    ("name", "dtype", "what"),
    [
        ("ct-int4", "F32", "expected BF16 or F16 [64, 1] (compressed-tensors int4"),
        ("modelopt-fp8-pcpt", "F16", "expected F32 [64] (modelopt fp8"),
    ],
)
def test_a_scale_of_another_dtype(
    copy_of: Callable[[str], Path], source: Path, name: str, dtype: str, what: str
) -> None:
    out, key = copy_of(name), f"{Q}.weight_scale"
    edit(out, lambda t: t.__setitem__(key, store(values_of(t[key]), dtype)))
    assert_only_fault(verify(out, source, foreign=True), key, what)


def test_wide_scales_of_quark(copy_of: Callable[[str], Path], source: Path) -> None:
    """Quark 0.13 from file to file stores scales in F32, a folder of ours never does."""
    out, key = copy_of("quark-int4"), f"{Q}.weight_scale"
    edit(out, lambda t: t.__setitem__(key, store(values_of(t[key]), "F32")))
    report = verify(out, source, foreign=True)
    assert report.ok
    (out / "draftquant.json").write_text(
        json.dumps(provenance_of(report, "absmax")), encoding="utf-8"
    )
    assert_only_fault(verify(out, source, foreign=True), key, "expected BF16 [64] (quark int4")


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight"])
def test_codes_are_compared_without_their_zero_points(
    copy_of: Callable[[str], Path], source: Path, suffix: str
) -> None:
    out = copy_of("quark-int4")
    edit(out, lambda t: t.pop(f"{Q}.weight_zero_point"))
    edit(out, lambda t: t.__setitem__(f"{Q}.weight", flip_bit(t[f"{Q}.weight"], 3)))
    assert f"{Q}.{suffix}" in [fault.where for fault in verify(out, source, foreign=True).faults]


def test_a_wrong_weight_shape(copy_of: Callable[[str], Path], source: Path) -> None:
    out, key = copy_of("ct-int4"), f"{Q}.weight_shape"
    wrong = Stored("I64", (2,), np.array([128, 64]).tobytes())
    edit(out, lambda t: t.__setitem__(key, wrong))
    assert_only_fault(verify(out, source, foreign=True), key, "expected [64, 128], got [128, 64]")


def test_a_zero_point_that_is_not_zero(copy_of: Callable[[str], Path], source: Path) -> None:
    out, key = copy_of("quark-int4"), f"{Q}.weight_zero_point"
    edit(out, lambda t: t.__setitem__(key, flip_bit(t[key], 100)))
    assert_only_fault(verify(out, source, foreign=True), key, "expected all zero (symmetric)")


@pytest.mark.parametrize("name", STATIC)
def test_static_activations_without_an_input_scale(
    copy_of: Callable[[str], Path], source: Path, name: str
) -> None:
    out, key = copy_of(name), f"{Q}.input_scale"
    edit(out, lambda t: t.pop(key))
    assert_only_fault(verify(out, source, foreign=True), key, "got none")


@pytest.mark.parametrize("name", STATIC)
def test_an_input_scale_that_is_no_scale_or_differs(
    copy_of: Callable[[str], Path], source: Path, name: str
) -> None:
    out, key = copy_of(name), "midlayer.mlp.down_proj.input_scale"
    edit(out, lambda t: t.__setitem__(key, set_scale(t[key], -1.0)))
    assert_only_fault(
        verify(out, source, foreign=True), key, "expected a finite scale > 0, got -1.0"
    )
    edit(out, lambda t: t.__setitem__(key, set_scale(t[key], 0.25)))
    assert verify(out, source, foreign=True).ok  # down_proj is not fused with anything
    edit(out, lambda t: t.__setitem__(f"{Q}.input_scale", set_scale(t[key], 0.25)))
    assert "expected one input_scale for fused linears" in faults_of(
        verify(out, source, foreign=True)
    )


def test_an_input_scale_that_is_not_declared(copy_of: Callable[[str], Path], source: Path) -> None:
    out = copy_of("quark-int4-static")
    edit_declaration(out, lambda d: d["global_quant_config"].update(input_tensors=None))
    report = verify(out, source, foreign=True)
    assert len(report.faults) == 7
    assert f"{Q}.input_scale: expected no such tensor" in faults_of(report)
