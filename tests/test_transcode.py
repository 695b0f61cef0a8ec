"""Codes carried by FP8, and transcoding: the same codes and scales, whatever stores them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import QuantizedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.making import transcode_draft as transcoding
from draftquant.quantize.making.transcode_draft import (
    CarrierChoice,
    plan_transcoding,
    transcode_draft,
)
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify.rewritten import verify_transcoded
from draftquant.quantize.verify.verification import verify
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.errors import LayoutError, VerifyError
from draftquant.recipes.schema import LayoutName
from mixes import DOWN, FP8, INT4_CHANNEL, mixed
from tiny import Stored, config_of, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from verify_cases import quantized_folder as quantized


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("transcode") / "draft", sharded=True)


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 128 rows: three (q, gate, up), and one and a half (k, v).

    The largest weight of each matrix is 21 times a power of two, and so is its scale in NVFP4 a
    power of two: most others cannot be had back from their stored inverse.
    """
    folder = tiny_eagle3_llama(
        tmp_path_factory.mktemp("blocks") / "draft",
        hidden=128, intermediate=384, heads=12, kv_heads=6, head_dim=32, sharded=True,
    )  # fmt: skip
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if "_proj" in name:
            values = values_of(tensor).copy()
            values[0, 0] = 21 * 2.0**-3
            tensors[name] = store(values, "BF16")
    write_tensors(folder, tensors, sharded=True)
    return folder


def transcoded(
    folder: Path, out: Path, layout: LayoutName | None = None, carrier: CarrierChoice | None = None
) -> Path:
    plan = plan_transcoding(DraftSource(folder=folder), layout, carrier, target_layers=4)
    transcode_draft(plan, out)
    return out


def record(folder: Path) -> QuantizedProvenance:
    found = read_provenance(folder)
    assert isinstance(found, QuantizedProvenance)
    return found


def same_weights(a: Path, b: Path) -> bool:
    """And the same rounding of inputs."""
    first, second = load_draft(a), load_draft(b)
    x = torch.linspace(-3, 3, 128)[None]
    rounded = ([d.forward.on_input(n, x) for n in d.quantized] for d in (first, second))
    return all(
        torch.equal(first.weights[name], second.weights[name]) for name in first.weights
    ) and all(torch.equal(a, b) for a, b in zip(*rounded, strict=True))


def grouped(scale_dtype: str | None) -> Recipe:
    recipe = load_recipe("int4-group128")
    weights = dataclasses.replace(recipe.weights, group_size=32, scale_dtype=scale_dtype)
    return dataclasses.replace(recipe, weights=weights)


def nvfp4(layout: LayoutName, *, inputs: bool = True) -> Recipe:
    recipe = dataclasses.replace(load_recipe("blackwell-nvfp4"), layout=layout)
    return recipe if inputs else dataclasses.replace(recipe, activations=None)


def blocks_of_128(layout: LayoutName) -> Recipe:
    recipe = load_recipe("fp8-ptpc")
    assert recipe.activations is not None
    return dataclasses.replace(
        recipe,
        layout=layout,
        weights=dataclasses.replace(recipe.weights, granularity="block", group_size=128),
        activations=dataclasses.replace(recipe.activations, granularity="group"),
    )


def test_verify_sees_every_other_code(draft: Path, tmp_path: Path) -> None:
    out = quantized(draft, tmp_path / "out", "mi325x-w4a8-fp8")
    tensors = read_tensors(out)
    name = next(name for name, t in tensors.items() if t.dtype == "F8_E4M3")
    for value in (0x80, 0x39, 0x51):  # -0, 1.125, 9
        data = bytearray(tensors[name].data)
        data[data.index(0)] = value
        write_tensors(out, tensors | {name: tensors[name]._replace(data=bytes(data))}, sharded=True)
        faults = [str(fault) for fault in verify(out, draft).faults]
        assert any("values nearest" in fault and name in fault for fault in faults)


# ---- from one layout into another

PAIRS: list[tuple[str | Recipe, LayoutName, CarrierChoice | None]] = [
    ("mi325x-w4a8", "compressed-tensors", "fp8_e4m3"),
    (grouped(None), "awq", None),
    (grouped("float16"), "awq", None),
    ("blackwell-fp8", "quark", None),
    (nvfp4("modelopt"), "compressed-tensors", None),
    (nvfp4("compressed-tensors"), "modelopt", None),
    (blocks_of_128("fp8"), "compressed-tensors", None),
]


@pytest.mark.some(3)
@pytest.mark.parametrize("case", PAIRS)
def test_there_and_back_in_many_blocks(
    case: Any, many_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, the record and verification stay; back in the first layout the bytes do too."""
    monkeypatch.setattr(transcoding, "_BLOCK", 1)  # 128 rows, the fewest
    recipe, layout, carrier = case
    first = quantized(many_blocks, tmp_path / "first", recipe)
    second = transcoded(first, tmp_path / "second", layout, carrier)
    assert same_weights(first, second)
    assert verify(second, many_blocks).faults == ()
    before, after = record(first), record(second)
    assert after.transcoded_from is not None
    assert after.transcoded_from.tensor_digests == before.tensor_digests
    assert after.source == before.source
    weights = before.recipe.weights
    int4 = weights.dtype == "int4" and weights.granularity == "channel"
    back = (weights.carrier or "none") if int4 else None
    third = transcoded(second, tmp_path / "third", before.recipe.layout, back)
    assert read_tensors(third) == read_tensors(first)
    assert config_of(third) == config_of(first)


def test_a_global_scale_that_its_stored_inverse_does_not_give_back(tmp_path: Path) -> None:
    """compressed-tensors' NVFP4 multiplies by the inverse of what is stored: that is the number.

    It may be the last digit away from absmax / 2688. A folder that stores the number itself has
    the former after transcoding, and the latter after quantizing; each is demanded exactly.
    """
    draft = tiny_eagle3_llama(tmp_path / "draft")
    weights = read_tensors(draft)
    name = "midlayer.self_attn.o_proj.weight"
    values = values_of(weights[name]).copy()
    values[0, 0] = 131 / 64  # of these a scale that is another after 1 / (1 / scale)
    write_tensors(draft, weights | {name: store(values, "BF16")})
    first = quantized(draft, tmp_path / "first", nvfp4("compressed-tensors", inputs=False))
    second = transcoded(first, tmp_path / "second", "modelopt")
    direct = quantized(draft, tmp_path / "direct", nvfp4("modelopt", inputs=False))
    scale = f"{name}_scale_2"
    assert read_tensors(second)[scale] != read_tensors(direct)[scale]
    assert same_weights(first, second)
    assert verify(second, draft).faults == verify(direct, draft).faults == ()
    third = transcoded(second, tmp_path / "third", "compressed-tensors")
    assert read_tensors(third) == read_tensors(first)
    with pytest.raises(VerifyError, match="o_proj: expected the source's scales, got"):
        transcoded(direct, tmp_path / "inverse", "compressed-tensors")
    write_tensors(second, read_tensors(second) | {scale: read_tensors(direct)[scale]})
    found = {fault.where: fault.expected for fault in verify(second, draft).faults}
    assert "/ 2688, inverse of the inverse" in found[scale]


def test_what_carries_foreign_codes_stays_in_another_layout(draft: Path, tmp_path: Path) -> None:
    """What FP8 carries is INT4, as the record of the first transcoding says."""
    first = quantized(draft, tmp_path / "first", "int4-channel")
    (first / "draftquant.json").unlink()
    second = transcoded(first, tmp_path / "second", carrier="fp8_e4m3")
    third = transcoded(second, tmp_path / "third", "quark")
    stored = (each.dtype for name, each in read_tensors(third).items() if "_proj.weight" in name)
    assert {*stored} == {"F8_E4M3", "F32"}  # codes and scales
    assert same_weights(first, third)


NOT_HELD: tuple[tuple[str | Recipe, LayoutName, CarrierChoice | None], ...] = (
    ("int4-channel", "awq", None),
    ("fp8-ptpc", "compressed-tensors", "fp8_e4m3"),
    ("int4-channel", "modelopt", "nvfp4"),
    ("mi355-mxfp4", "modelopt", "nvfp4"),
    ("mxfp4-weights", "quark", "nvfp4"),
    (mixed(FP8, (INT4_CHANNEL, DOWN)), "quark", None),
)


def test_a_layout_that_cannot_hold_the_codes(draft: Path, tmp_path: Path) -> None:
    for number, (recipe, layout, carrier) in enumerate(NOT_HELD):
        first = quantized(draft, tmp_path / f"{number}", recipe)
        with pytest.raises(LayoutError):
            plan_transcoding(DraftSource(folder=first), layout, carrier)


def test_scales_that_a_layout_would_round(draft: Path, tmp_path: Path) -> None:
    """2^-30 is no float16: refused, nothing is left, and the tensor is named."""
    first = quantized(draft, tmp_path / "first", grouped(None))
    (first / "draftquant.json").unlink()
    tensors = read_tensors(first)
    name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    scale = bytearray(tensors[name].data)
    scale[:2] = (0x3080).to_bytes(2, "little")  # 2^-30 in BF16
    tensors[name] = Stored("BF16", tensors[name].shape, bytes(scale))
    write_tensors(first, tensors, sharded=True)
    with pytest.raises(LayoutError):
        transcoded(first, tmp_path / "second", "awq")
    assert not (tmp_path / "second").exists()


# ---- MXFP4 as NVFP4


LAYOUTS: tuple[LayoutName, ...] = ("modelopt", "compressed-tensors")


def with_exponents(folder: Path, *changes: tuple[int, int], zeros: bool = False) -> dict[str, Any]:
    """The folder's down_proj with other (group, exponent) in row 0, the first of zeros if asked."""
    tensors, name = read_tensors(folder), "midlayer.mlp.down_proj.weight"
    scales = bytearray(tensors[f"{name}_scale"].data)
    codes = bytearray(tensors[name].data)
    for group, exponent in changes:
        scales[group] = exponent + 127
    if zeros:
        codes[:16] = bytes([0x80] * 16)  # pairs of 0 and -0
    changed = {
        f"{name}_scale": tensors[f"{name}_scale"]._replace(data=bytes(scales)),
        name: tensors[name]._replace(data=bytes(codes)),
    }
    write_tensors(folder, tensors | changed, sharded=True)
    (folder / "draftquant.json").unlink()
    return changed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["mxfp4-weights", "mxfp4-weights of another tool"])
def test_mxfp4_becomes_nvfp4(recipe: str, layout: LayoutName, draft: Path, tmp_path: Path) -> None:
    first = quantized(draft, tmp_path / "first", recipe.split()[0])
    if "another" in recipe:
        with_exponents(first, (0, -100), (1, -3), zeros=True)  # what zeros are multiplied by
    second = transcoded(first, tmp_path / "second", layout, "nvfp4")
    assert same_weights(first, second)
    other = transcoded(second, tmp_path / "other", LAYOUTS[LAYOUTS[0] == layout])
    assert same_weights(first, other)
    if "another" not in recipe:
        assert verify(second, draft).faults == verify(other, draft).faults == ()


def test_scales_too_far_apart_for_nvfp4_are_named(draft: Path, tmp_path: Path) -> None:
    """E4M3 has 18 powers of two, 2^-9 to 2^8, for the scales below one over the block."""
    for number, least in enumerate((-14, -15)):
        first = quantized(draft, tmp_path / f"first{number}", "mxfp4-weights")
        with_exponents(first, (0, 3), (1, least))
        out = tmp_path / f"second{number}"
        if least == -14:
            assert same_weights(first, transcoded(first, out, "modelopt", "nvfp4"))
            continue
        with pytest.raises(LayoutError, match=r"down_proj: row 0, group 1.*more than 17 powers"):
            transcoded(first, out, "modelopt", "nvfp4")
        assert not out.exists()


def test_a_scale_of_half_a_group_that_is_another_one_is_seen(draft: Path, tmp_path: Path) -> None:
    first = quantized(draft, tmp_path / "first", "mxfp4-weights")
    second = transcoded(first, tmp_path / "second", "modelopt", "nvfp4")
    source, tensors = StoredDraft.read(Checkpoint.open(first)), read_tensors(second)
    assert verify_transcoded(source, second).faults == []
    name = "midlayer.mlp.up_proj.weight_scale"
    data = bytearray(tensors[name].data)
    data[1] ^= 8  # the second half of the first group, times or by two
    write_tensors(second, tensors | {name: tensors[name]._replace(data=bytes(data))}, sharded=True)
    found = {fault.where: fault.got for fault in verify_transcoded(source, second).faults}
    assert found["midlayer.mlp.up_proj"] == "1 other(s)"
    assert not any("_proj" in where for where in found.keys() - {"midlayer.mlp.up_proj"})
