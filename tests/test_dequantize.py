"""Dequantized folders: every bit is what the quantized one stands for, and errors leave nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from draftquant.api import dequantize
from draftquant.quantize.backends import get_backend
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.safetensors_header import FloatDtype
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.scales import rounded_bytes
from draftquant.recipes import WeightFormat, load_recipe
from draftquant.recipes.errors import CheckpointError
from draftquant.recipes.schema import LayoutName
from test_formats import CASES, recipe
from tiny import Stored, edit_json, fused_absmax, read_tensors, tiny_eagle3_llama
from verify_cases import edit, flip_bit
from verify_cases import quantized_folder as quantized

STORAGE = {case[:2]: case for case in CASES}
"""Each layout with each weight format once, with the last of its activations: often static."""
UP = "midlayer.mlp.up_proj"
CODES = f"{UP}.weight_packed"
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole groups of 128 inputs everywhere, but rows that are no whole blocks of 128."""
    folder = tmp_path_factory.mktemp("dequantize") / "draft"
    return tiny_eagle3_llama(
        folder, hidden=128, intermediate=256, heads=9, kv_heads=3, head_dim=128, sharded=True
    )


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of recipe int4-channel."""
    folder = tmp_path_factory.mktemp("int4")
    return quantized(tiny_eagle3_llama(folder / "draft"), folder / "out", "int4-channel")


def as_torch(stored: Stored) -> torch.Tensor:
    return torch.frombuffer(bytearray(stored.data), dtype=TORCH[stored.dtype]).reshape(stored.shape)


@pytest.mark.some(3)
@pytest.mark.parametrize(("layout", "weights"), STORAGE, ids=str)
def test_every_layout_and_format_gives_the_weights_that_were_computed(
    layout: LayoutName, weights: WeightFormat, draft: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("draftquant.quantize.stored.linear._DECODED", 2**14)
    packed = quantized(draft, tmp_path / "packed", recipe(*STORAGE[layout, weights]))
    assert verify(packed, draft).ok
    wide = dequantize(packed, tmp_path / "F32", dtype="float32")
    reports = [dequantize(packed, tmp_path / "BF16"), wide]
    loaded, exact = load_draft(packed), load_draft(tmp_path / "F32")
    assert (len(loaded.quantized), exact.quantized) == (7, ())
    assert all(torch.equal(w, exact.weights[name]) for name, w in loaded.weights.items())
    assert exact.fusion_sha256 == loaded.fusion_sha256
    original, plain = Checkpoint.open(draft), Checkpoint.open(tmp_path / "BF16")
    assert (plain.config, plain.index) == (original.config, original.index)
    assert [(t.name, t.dtype, t.shape, t.file) for t in plain.tensors.values()] == [
        (t.name, t.dtype, t.shape, t.file) for t in original.tensors.values()
    ]
    assert set(plain.side_files()) == {*original.side_files(), "draftquant.json"}

    before = read_tensors(draft)
    names = {f"{linear.module}.weight" for linear in reports[0].linears}
    for report, dtype in zip(reports, ("BF16", "F32"), strict=True):
        after = read_tensors(tmp_path / dtype)
        assert after.keys() == before.keys()
        assert (report.dtype, len(report.linears), report.kept) == (dtype, 7, len(before) - 7)
        both = {x.module: (x.rounded, x.max_relative_difference) for x in report.linears}
        lost = {f"{module}.weight": found for module, found in both.items()}
        rounded = sum(count for count, _ in lost.values())
        largest = max(relative for _, relative in lost.values())
        for name, tensor in before.items():
            if name not in names:
                assert after[name] == tensor
                continue
            whole = torch.tensor([[fused_absmax(before, name.removesuffix(".weight"))]])
            absmax = whole if weights.scales_whole_matrix else None
            product = get_backend("torch").quantize(as_torch(tensor), weights, absmax).dequantized()
            if layout == "compressed-tensors" and weights.dtype == "nvfp4":
                # It stores the inverse of the global scale: two roundings of 2^-24.
                stored = loaded.weights[name.replace("midlayer.", "layers.0.")]
                torch.testing.assert_close(stored, product, rtol=2**-22, atol=0)
                product = stored
            nearest = product.to(TORCH[dtype])
            assert after[name].dtype == dtype
            assert torch.equal(as_torch(after[name]), nearest)
            difference = (nearest.double() - product.double()).abs()
            relative = (difference / product.double().abs())[product != 0].max()
            assert lost[name] == (int((difference > 0).sum()), float(relative))
        assert (report.rounded, report.max_relative_difference) == (rounded, largest)
        # Half an ulp of 8 significant bits is at most 2^-8 of the value; MXFP4 needs only 2 bits.
        assert largest <= 2**-8
        assert (rounded == 0) == (dtype == "F32" or weights.dtype == "mxfp4")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rounding_by_integers_is_torch_s_rounding(dtype: FloatDtype) -> None:
    """All ties of BF16 in two octaves, both zeros, subnormals, and random values."""
    rng = np.random.default_rng(0)
    ties = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16) | 0x8000
    around = np.concatenate([ties - 1, ties, ties + 1, ties | 0x80000000]).astype(np.uint32)
    small = np.array([0, 1 << 31, 1, 0x8000, 0x8001, 0x18000, 0x33000000], np.uint32)
    noise = rng.standard_normal(4096, dtype=np.float32)
    values = np.concatenate([around.view(np.float32), small.view(np.float32), noise])
    expected = torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy()
    assert rounded_bytes(values, dtype).tobytes() == expected.tobytes()


def set_first(folder: Path, name: str, value: bytes) -> None:
    old = read_tensors(folder)[name]
    changed = old._replace(data=value + old.data[len(value) :])
    edit(folder, lambda tensors: tensors.update({name: changed}))


NORM = Stored("F32", (64,), bytes(4 * 64))


BAD: dict[str, Callable[[Path], None]] = {
    "not quantized": lambda f: edit_json(f / "config.json", quantization_config=None),
    "NaN scale": lambda f: set_first(f, f"{UP}.weight_scale", b"\xc0\x7f"),
    "zero scale": lambda f: set_first(f, f"{UP}.weight_scale", b"\0\0"),
    "mixed dtypes": lambda f: edit(f, lambda t: t.update({"norm.weight": NORM})),
    "changed codes": lambda f: edit(f, lambda t: t.update({CODES: flip_bit(t[CODES], 3)})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_leaves_nothing(case: str, int4: Path, tmp_path: Path) -> None:
    packed = shutil.copytree(int4, tmp_path / "packed")
    BAD[case](packed)
    with pytest.raises(CheckpointError):
        dequantize(packed, tmp_path / "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_a_value_too_large_for_float16(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", dtype="F16")
    packed = quantized(source, tmp_path / "packed", load_recipe("fp8-ptpc"))
    (packed / "draftquant.json").unlink()
    set_first(packed, f"{UP}.weight_scale", np.float32(1000).tobytes())
    for largest in (b"\x7e", b"\xfe"):  # 448 and -448
        set_first(packed, f"{UP}.weight", largest + bytes(63))
        with pytest.raises(CheckpointError, match="values up to 448000, which F16 cannot hold"):
            dequantize(packed, tmp_path / "plain")
        assert not (tmp_path / "plain").exists()
    assert dequantize(packed, tmp_path / "plain", dtype="float32").rounded == 0
