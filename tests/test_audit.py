"""`inspect` on quantized folders: figures worked out independently, and every fault triggered."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.backends import get_backend
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.numerics.number_formats import fp4_values
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight
from draftquant.quantize.stored.stored_declaration import looks_quantized
from draftquant.quantize.verify.audit import Audit, LinearAudit, audit_checkpoint
from draftquant.recipes import ActivationFormat, WeightFormat
from draftquant.recipes.schema import LayoutName
from handmade import MADE, by_hand, quantize_by_hand, stored_parts
from handmade_numbers import Rounded, code_values, codes_under, e4m3_values, nearest_e4m3
from test_formats import CASES, recipe
from tiny import Stored, fused_absmax, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import ATTENTION, Q, Tensors, edit, edit_declaration, flip_bit, set_scale

TOP = {"int4": 7, "fp8_e4m3": 448, "nvfp4": 6, "mxfp4": 4}
"""What the largest weight under an absmax scale is rounded to, at least."""
Change = Callable[[Tensors], Any]
Copy = Callable[[str], Path]


def audited(folder: Path) -> Audit:
    checkpoint = Checkpoint.open(folder)
    assert looks_quantized(checkpoint)
    return audit_checkpoint(checkpoint)


def linear_of(found: Audit, module: str = Q) -> LinearAudit:
    (linear,) = (linear for linear in found.linears if linear.module == module)
    return linear


def faults_of(folder: Path) -> list[str]:
    return [str(fault) for fault in audited(folder).faults]


def assert_only_fault(folder: Path, *parts: str) -> None:
    faults = faults_of(folder)
    assert len(faults) == 1, faults
    for part in parts:
        assert part in faults[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("audit") / "source", pruned_vocabulary=True)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One correct folder per layout, made without the package; tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    return {name: quantize_by_hand(source, folder / name, how) for name, how in MADE.items()}


@pytest.fixture
def copy_of(made: dict[str, Path], tmp_path: Path) -> Copy:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(made[name], tmp_path / name))

    return copy


# ---- every layout and format, against the numbers of the backend


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole groups of 128 inputs everywhere, but rows that are no whole blocks of 128."""
    folder = tmp_path_factory.mktemp("formats") / "draft"
    return tiny_eagle3_llama(
        folder, hidden=128, intermediate=256, heads=9, kv_heads=3, head_dim=128, vocab=96
    )


def computed(source: Tensors, module: str, weights: WeightFormat) -> QuantizedWeight:
    tensor = source[f"{module}.weight"]
    raw = torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape)
    whole = torch.tensor([[fused_absmax(source, module)]])
    absmax = whole if weights.scales_whole_matrix else None
    return get_backend("torch").quantize(raw, weights, absmax)


def largest_codes(values: torch.Tensor, block: QuantizedWeight) -> torch.Tensor:
    """Largest magnitude under every scale: each scale covers an equal rectangle, the last less."""
    rows, columns = block.scale.shape
    height, width = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
    if block.group_size is not None:
        width = block.group_size
        height = width if rows < values.shape[0] else 1
    return torch.tensor(
        [
            [
                values[r * height : (r + 1) * height, c * width : (c + 1) * width].abs().max()
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )


@pytest.mark.each_value
@pytest.mark.parametrize(("layout", "weights", "inputs"), CASES, ids=str)
def test_every_layout_and_format_gives_the_figures_that_were_computed(
    layout: LayoutName,
    weights: WeightFormat,
    inputs: ActivationFormat | None,
    draft: Path,
    tmp_path: Path,
) -> None:
    chosen = recipe(layout, weights, inputs)
    out = quantized(draft, chosen, tmp_path / "out", scale=0.01).out
    found = audited(out)
    assert found.faults == ()
    assert found.scheme is not None
    assert (found.scheme.layout.name, found.scheme.weight_dtype) == (layout, weights.dtype)
    assert len(found.linears) == 7
    before, after = read_tensors(draft), read_tensors(out)
    assert found.quantized_bytes == sum(
        len(t.data) for name, t in after.items() if name not in before or before[name] != t
    )
    for linear in found.linears:
        block = computed(before, linear.module, weights)
        fp4 = block.codes.dtype == torch.uint8
        values = fp4_values(block.codes) if fp4 else block.codes.float()
        ends = {"int4": (-8, 7), "fp8_e4m3": (-448, 448)}.get(weights.dtype, (-6, 6))
        codes = linear.codes
        assert codes is not None
        assert codes.num_scales == block.scale.numel()
        at_an_end = (values == ends[0]) | (values == ends[1])
        assert codes.saturated == at_an_end.double().mean().item()
        assert codes.zero == (values == 0).double().mean().item()
        assert codes.distinct == len(values.unique() if not fp4 else (values + 0.0).unique())
        assert codes.possible == {"int4": 16, "fp8_e4m3": 253}.get(weights.dtype, 15)
        scale = block.scale.float() * (1 if block.global_scale is None else block.global_scale)
        # compressed-tensors stores the inverse of NVFP4's global scale: two roundings of 2^-24.
        slack = 2**-22 if layout == "compressed-tensors" and weights.dtype == "nvfp4" else 0
        expected = scale.min().item(), scale.max().item()
        assert (codes.smallest_scale, codes.largest_scale) == pytest.approx(expected, rel=slack)
        largest = largest_codes(values, block)
        fit = (largest >= TOP[weights.dtype]).double().mean().item()
        assert codes.scales_fit == pytest.approx(fit, rel=1e-12)
        assert (codes.zero_halves is not None) == (linear.module.rpartition(".")[2][0] in "qkv")
        if codes.zero_halves is not None:
            halves = [(half == 0).double().mean().item() for half in values.chunk(2, dim=1)]
            assert list(codes.zero_halves) == halves
        stored = [name for name in after if name.rpartition(".")[0] == linear.module]
        assert [tensor.name for tensor in linear.tensors] == sorted(stored)
        assert linear.nbytes == sum(len(after[name].data) for name in stored)
        if chosen.needs_input_scales:
            static = linear.input_scale
            assert static is not None
            divides = layout == "compressed-tensors" and weights.dtype == "nvfp4"
            assert static == pytest.approx(100 if divides else 0.01, rel=2**-7)  # stored in BF16
        else:
            assert linear.input_scale is None


# ---- figures in plain numpy


@pytest.mark.parametrize(
    ("name", "factor", "below"),
    [
        ("ct-int4", 1.2, 6),  # 7.5 / 1.2 = 6.25
        ("quark-fp8", 1.06, 416),  # 448 / 1.06 = 423, between 416 and 448
        ("modelopt-nvfp4", 1.5, 4),  # 6 / 1.5, the scale rounded to E4M3
        ("quark-mxfp4", 2, 3),  # from [3.5, 7) to [1.75, 3.5)
    ],
)
def test_scales_fit_whose_largest_code_is_the_top_one(
    copy_of: Copy, source: Path, name: str, factor: float, below: int
) -> None:
    """Every second row has scales too large, under which the next smaller code is the largest."""
    out, made = copy_of(name), MADE[name]
    weight, largest = read_tensors(source)[f"{Q}.weight"], fused_absmax(read_tensors(source), Q)
    right = by_hand(weight, made, 2 * largest)  # NVFP4: half of 448 is the largest scale
    scale = right.scale.copy()
    scale[::2] *= np.float32(factor)
    if made.dtype == "nvfp4":
        scale = e4m3_values(nearest_e4m3(scale), scale.shape)
    scale = values_of(store(scale, "BF16")) if made.dtype == "int4" else scale
    w = values_of(weight)
    codes = codes_under(w, made.dtype, made.granularity, scale, right.whole)
    parts = stored_parts(Rounded(codes, scale, right.whole), "BF16", made)
    edit(out, lambda tensors: tensors.update({f"{Q}.{s}": part for s, part in parts.items()}))
    found = linear_of(audited(out)).codes
    assert found is not None
    assert found.scales_fit == 0.5
    values = code_values(made.dtype)  # without minus zero
    assert max(abs(values.get(int(code), 0)) for code in np.unique(codes[::2])) == below


def test_folders_made_elsewhere_have_no_faults(made: dict[str, Path]) -> None:
    assert {name: faults_of(folder) for name, folder in made.items()} == {n: [] for n in made}


# ---- faults of stored tensors


def replaced(name: str, change: Callable[[Stored], Stored]) -> Change:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


def copied(name: str, to: str) -> Change:
    return lambda tensors: tensors.__setitem__(to, tensors[name])


def with_a_nan(fp8: Stored) -> Stored:
    return fp8._replace(data=fp8.data[:300] + b"\x7f" + fp8.data[301:])


def bfloat16(tensor: Stored) -> Stored:
    return store(values_of(tensor), "BF16")


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("quark-int4", lambda t: t.pop(f"{Q}.weight_scale"), [f"{Q}.weight_scale", "got none"]),
        ("quark-fp8", lambda t: t.pop(f"{Q}.weight"), [f"{Q}.weight: ", "F8_E4M3 [64, 128]"]),
        ("modelopt-fp8", lambda t: t.pop(f"{Q}.input_scale"), [f"{Q}.input_scale", "got none"]),
        (
            "modelopt-fp8",
            replaced(f"{Q}.weight_scale", bfloat16),
            [f"{Q}.weight_scale: expected F32 []", "got BF16 []"],
        ),
        (
            "ct-fp8",
            replaced(f"{Q}.weight_scale", lambda t: t._replace(shape=(1, 64))),
            [f"{Q}.weight_scale: expected F32 or BF16 [64, 1]", "got F32 [1, 64]"],
        ),
        (
            "ct-int4",
            copied("norm.weight", f"{Q}.weight_g_idx"),
            [f"{Q}.weight_g_idx: expected no such tensor, got BF16 [64]"],
        ),
        (
            "quark-int4",
            copied("norm.weight", "norm.weight_scale"),
            ["norm: expected only linears of eagle3-llama to be quantized"],
        ),
        (
            "quark-int4",
            copied(f"{Q}.weight_scale", "layers.7.self_attn.q_proj.weight_scale"),
            ["layers.7.self_attn.q_proj: expected only linears of eagle3-llama"],
        ),
        (
            "quark-int4",
            replaced(f"{Q}.weight_zero_point", lambda t: flip_bit(t, 3)),
            [f"{Q}.weight_zero_point: expected all zero (symmetric)"],
        ),
        (
            "ct-int4",
            replaced(f"{Q}.weight_shape", lambda t: t._replace(data=np.array([64, 64]).tobytes())),
            [f"{Q}.weight_shape: expected [64, 128], got [64, 64]"],
        ),
        (
            "quark-fp8",
            replaced(f"{Q}.weight", with_a_nan),
            [
                f"{Q}.weight: expected quantized values that are numbers",
                "1 NaN(s), first at row 2, column 44",
            ],
        ),
    ],
)  # fmt: skip
def test_a_fault_of_stored_tensors(
    copy_of: Copy, name: str, change: Change, parts: list[str]
) -> None:
    out = copy_of(name)
    edit(out, change)
    assert_only_fault(out, *parts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quark-int4", float("nan")), ("quark-fp8", float("inf")), ("ct-int4", 0.0),
        ("modelopt-fp8", -0.5), ("ct-int4", -0.5),
    ],
)  # fmt: skip
def test_a_scale_that_is_no_positive_number(copy_of: Copy, name: str, value: float) -> None:
    out = copy_of(name)
    edit(out, replaced(f"{Q}.weight_scale", lambda t: set_scale(t, value)))
    if (name, value) == ("ct-int4", -0.5):  # AutoRound's are
        assert faults_of(out) == []
        return
    assert_only_fault(out, f"{Q}.weight_scale: expected finite scales > 0, got 1 other(s)", "row 0")
    codes = linear_of(audited(out)).codes
    assert codes is not None
    json.dumps(audited(out).to_mapping(), allow_nan=False)


# ---- faults of the declaration


def test_excludes_that_miss_a_kept_module(copy_of: Copy) -> None:
    out = copy_of("quark-int4")
    edit_declaration(out, lambda d: d["exclude"].remove("model.fc"))
    assert_only_fault(out, "config.json: model.fc: expected excluded: it is kept")


def test_fused_linears_of_which_one_is_kept(copy_of: Copy, source: Path) -> None:
    out, before = copy_of("quark-fp8"), read_tensors(source)

    def keep_k(tensors: Tensors) -> None:
        for suffix in ("weight", "weight_scale"):
            del tensors[f"{ATTENTION}k_proj.{suffix}"]
        tensors[f"{ATTENTION}k_proj.weight"] = before[f"{ATTENTION}k_proj.weight"]

    edit(out, keep_k)
    assert any(
        f"expected all or none of them quantized, got kept: {ATTENTION}k_proj" in fault
        for fault in faults_of(out)
    )
    assert len(audited(out).linears) == 6


def test_fused_linears_that_disagree_in_the_input_scale(copy_of: Copy) -> None:
    out = copy_of("quark-fp8-static")
    edit(out, replaced(f"{Q}.input_scale", lambda t: set_scale(t, 0.25)))
    assert_only_fault(out, f"{Q}.input_scale", "one input_scale for fused linears", "0.25")
    assert linear_of(audited(out)).input_scale == 0.25


def without_declaration(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_quantized_tensors_without_a_declaration(copy_of: Copy) -> None:
    out = without_declaration(copy_of("ct-int4"))
    assert_only_fault(
        out,
        "config.json: quantization_config: expected a declaration",
        "7 linears stored as weight",
    )
    found = audited(out)
    assert found.scheme is None
    assert [linear.codes for linear in found.linears] == [None] * 7
    assert found.quantized_bytes > 0


def test_a_declaration_over_plain_weights(
    source: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(source, tmp_path / "plain"))
    shutil.copyfile(made["quark-int4"] / "config.json", out / "config.json")
    assert_only_fault(out, "quantization_config: expected linears stored as quark int4", "got none")


# ---- what is no fault, but tells


@pytest.mark.parametrize("layout", ["quark", "awq", "compressed-tensors"])
def test_codes_that_use_less_than_half_of_the_range_everywhere(
    draft: Path, tmp_path: Path, layout: LayoutName
) -> None:
    """Scales half as large, with codes twice as large, would hold the very same weights."""
    groups = WeightFormat(dtype="int4", granularity="group", group_size=128, symmetric=True)
    scaled = dataclasses.replace(groups, scale_dtype="float16")
    out = quantized(draft, recipe(layout, scaled, None), tmp_path / "out").out
    assert faults_of(out) == []
    suffix = {"awq": "qweight", "compressed-tensors": "weight_packed"}.get(layout, "weight")
    zero = 0x0 if layout == "quark" else 0x8  # the nibble of code 0
    nibble = zero + 3
    edit(
        out,
        replaced(
            f"{Q}.{suffix}", lambda t: t._replace(data=bytes([nibble << 4 | zero]) * len(t.data))
        ),
    )
    assert_only_fault(
        out, f"{Q}.{suffix}: expected codes up to 7", "got none beyond 3 in the whole"
    )
    edit(
        out, replaced(f"{Q}.{suffix}", lambda t: t._replace(data=t.data[:-1] + bytes([nibble + 1])))
    )
    assert faults_of(out) == []  # one code of 4
