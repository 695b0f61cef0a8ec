"""Weights of several blocks of rows: what is written, verified, decoded and dequantized of them.

Blocks of a real run hold millions of weights, so writing is made to take smaller ones here. Those
of the reading side (2^17 and 2^18 weights, 2 MiB of a kept tensor) are filled by the draft itself.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from by_recipe import quantized
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making import execute
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.errors import BackendError
from handmade import MADE, by_hand, quantize_by_hand, stored_parts
from handmade_numbers import code_values, spread
from tiny import Stored, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import assert_only_fault, edit, flip_bit, method_of

UP, DOWN = "midlayer.mlp.up_proj", "midlayer.mlp.down_proj"
V = "midlayer.self_attn.v_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks of 128 rows, and one and a half (k, v); the largest weights stand in the first.

    Every row is a multiple of 128 inputs long, so that each recipe can quantize it.
    """
    folder = tmp_path_factory.mktemp("blocks") / "draft"
    tiny_eagle3_llama(
        folder, hidden=128, intermediate=384, heads=12, kv_heads=6, head_dim=32, num_layers=2
    )

    def first_rows_largest(tensors: dict[str, Stored]) -> None:
        for name, tensor in tensors.items():
            values = values_of(tensor).copy()
            if len(values) > 128 and values.ndim == 2:
                values[:128] *= 4
                tensors[name] = store(values, "BF16")

    edit(folder, first_rows_largest)
    return folder


def other_forms() -> dict[str, Recipe]:
    """Recipes, and the layouts of blocks that none has."""
    names = ("mi325x-int4-awq", "mi325x-w4a8", "int4-channel", "blackwell-fp8", "blackwell-nvfp4")
    found = {name: load_recipe(name) for name in names}
    fp8 = load_recipe("fp8-ptpc")
    assert fp8.activations is not None
    groups = dataclasses.replace(fp8.activations, granularity="group")
    blocks = dataclasses.replace(fp8.weights, granularity="block", group_size=128)
    found["fp8-blocks"] = dataclasses.replace(fp8, layout="fp8", weights=blocks, activations=groups)
    found["fp8-matrix"] = dataclasses.replace(found["blackwell-fp8"], layout="fp8")
    return found


RECIPES = other_forms()


def files(source: Path, recipe: Recipe, out: Path) -> dict[str, bytes]:
    """Those of a folder quantized by a recipe."""
    quantized(source, recipe, out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"int4-channel", "blackwell-fp8"}))
def test_blocks_of_rows_give_the_bytes_of_whole_weights(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files(source, RECIPES[name], tmp_path / "whole")
    monkeypatch.setattr(execute, "BLOCK_BYTES", 1)  # 128 rows, the fewest
    monkeypatch.setattr(execute, "WRITE_BYTES", 1)
    assert files(source, RECIPES[name], tmp_path / "blocks") == whole
    # 192 rows would fit, but are no whole blocks of 128.
    monkeypatch.setattr(execute, "BLOCK_BYTES", 192 * 128 * 2)
    assert files(source, RECIPES[name], tmp_path / "ragged") == whole


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("int4-channel", 300, b"\xc0\x7f", r"row 300 holds NaN or inf"),
        ("blackwell-fp8", 129, b"\x80\x7f", r"row 129 holds NaN or inf"),
        ("mi325x-int4-awq", 383, bytes(2 * 128), r"1 all-zero row\(s\) from row 383"),
    ],
)
def test_a_damaged_row_of_a_later_block_is_named(
    name: str, row: int, value: bytes, message: str, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(execute, "BLOCK_BYTES", 1)
    draft, start = Path(shutil.copytree(source, tmp_path / "draft")), row * 2 * 128

    def damage(tensors: dict[str, Stored]) -> None:
        data = tensors[f"{UP}.weight"].data
        changed = data[:start] + value + data[start + len(value) :]
        tensors[f"{UP}.weight"] = Stored("BF16", (384, 128), changed)

    edit(draft, damage)
    with pytest.raises(BackendError, match=rf"{UP}.weight: {message}"):
        files(draft, RECIPES[name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- the reading side


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Up and gate: 1152 rows of 384, four blocks of 341 rows and two of 680; kept: 3 MiB."""
    folder = tmp_path_factory.mktemp("large") / "draft"
    return tiny_eagle3_llama(
        folder, hidden=384, intermediate=1152, heads=6, kv_heads=3, head_dim=64, vocab=4096
    )


@pytest.fixture(scope="module")
def awq(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transposed words: a block of 341 rows ends within one."""
    return quantize_by_hand(large, tmp_path_factory.mktemp("large") / "awq", MADE["awq"])


def by_hand_values(source: Path, module: str) -> np.ndarray:
    """Code * scale of AWQ in float32, the product rounded once."""
    made = MADE["awq"]
    codes, scale, _ = by_hand(read_tensors(source)[f"{module}.weight"], made)
    values = np.vectorize(code_values(made.dtype).__getitem__)(codes).astype(np.float32)
    return np.asarray(values * spread(scale, made.dtype, made.granularity, codes.shape))


def test_a_dequantized_weight_of_several_blocks(
    awq: Path, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftquant.quantize.stored.linear._DECODED", 2**16)  # three at least
    dequantize_draft(DraftSource(folder=awq), tmp_path / "plain", dtype="F32")
    plain = read_tensors(tmp_path / "plain")
    for module in (UP, DOWN, V):
        ours = values_of(plain[f"{module}.weight"])
        np.testing.assert_array_equal(ours, by_hand_values(large, module))


def test_wrong_codes_are_counted_and_the_worst_is_named(large: Path, tmp_path: Path) -> None:
    """Three codes, one in each of three blocks, the one in the last block four steps off."""
    made = MADE["ct-int4"]
    right = by_hand(read_tensors(large)[f"{UP}.weight"], made)
    codes = right.codes.copy()
    for row, column, steps in ((5, 7, 1), (400, 100, 1), (1100, 383, 4)):
        codes[row, column] += steps if codes[row, column] < 0 else -steps
    out = quantize_by_hand(large, tmp_path / "out", made)
    parts = stored_parts(right._replace(codes=codes), "BF16", made)
    edit(out, lambda t: t.update({f"{UP}.{suffix}": part for suffix, part in parts.items()}))
    report = verify(out, large, foreign=True)
    assert_only_fault(report, f"{UP}.weight_packed", "3 other(s), worst at row 1100, column 383:")
    codes[5, 7] = right.codes[5, 7]
    parts = stored_parts(right._replace(codes=codes), "BF16", made)
    edit(out, lambda t: t.update({f"{UP}.{suffix}": part for suffix, part in parts.items()}))
    own = verify(out, large, method=method_of(out))
    assert_only_fault(own, f"{UP}.weight_packed", "2 other(s), first at row 400, column 100:")


def test_a_kept_tensor_that_differs_in_any_block(large: Path, awq: Path, tmp_path: Path) -> None:
    """The report has the hashes of both tensors, wherever the first difference is."""
    name, at = "embed_tokens.weight", 2500 * 768 + 11
    tensors = read_tensors(awq)
    changed = flip_bit(tensors[name], 8 * at + 3)
    changed = flip_bit(changed, 8 * (4096 * 768 - 1))  # and in the last block
    out = Path(shutil.copytree(awq, tmp_path / "out"))
    edit(out, lambda t: t.update({name: changed}))
    report = verify(out, large, foreign=True)
    count = sum(a != b for a, b in zip(changed.data, tensors[name].data, strict=True))
    assert_only_fault(report, name, f"{count} different byte(s), first at byte {at}")
    assert report.source_digests[name] == f"blake3:{blake3(tensors[name].data).hexdigest()}"
    assert report.output_digests[name] == f"blake3:{blake3(changed.data).hexdigest()}"
