"""What kernels see of inputs, by format: by hand, by definition, and by compressed-tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.stored.layouts.scheme import Activations
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.online_rounding import InputRounding
from foreign_nvfp4 import NVFP4, by_compressed_tensors, input_scales
from safetensors.torch import load_file, save_file
from tiny import tiny_eagle3_llama
from torch import Tensor
from verify_cases import quantized_folder


def rounded(how: Activations, scale: float | None, x: Tensor) -> Tensor:
    scales = {} if scale is None else {"q": torch.tensor(scale)}
    return InputRounding({"q": how}, scales, None)("q", x)


E4M3 = sorted(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""In the order of their codes, so that an even place is an even mantissa."""


def nearest(value: float, of: Sequence[float]) -> float:
    """Ties to the even code; beyond the last value, the last."""
    place = min(range(len(of)), key=lambda i: (abs(of[i] - min(abs(value), of[-1])), i % 2))
    return -of[place] if value < 0 else of[place]


def defined(how: Activations, scale: float | None, x: np.ndarray[Any, Any]) -> list[list[float]]:
    """Each row in pieces of those that share a scale; quotients and scales are float32."""
    f32 = np.float32
    sizes = {"group-dynamic": 128, "group-dynamic-64": 64, "nvfp4": 16, "mxfp4": 32}
    size = sizes.get(how, x.shape[1])
    largest = np.abs(x).max()
    out = []
    for row in x:
        values: list[float] = []
        for start in range(0, len(row), size):
            piece = row[start : start + size]
            absmax = largest if how == "tensor-dynamic" else np.abs(piece).max()
            if how == "tensor-static":
                step = f32(scale)
            elif how == "nvfp4":
                step = f32(nearest(f32(scale) * f32(absmax / f32(6)), E4M3)) / f32(scale)
            elif how == "mxfp4":
                top = 2.0 ** np.floor(np.log2(absmax))
                step = f32(top * (2 if absmax >= 1.75 * top else 1) / 4)
            else:
                step = f32(absmax / f32(448))
            grid = E2M1 if how in ("nvfp4", "mxfp4") else E4M3
            values += [
                float(f32(nearest(f32(v / step), grid)) * step) if step else 0 for v in piece
            ]
        out.append(values)
    return out


TIES = (448.0, 17.0, -19.0, 2.0**-10, 6.375, 7.0, 2.5, 1.5, -0.75, -0.25, 3.5, 0.0)
"""Half way between two values of E4M3 or E2M1 under a scale of 1, or where MXFP4's rounds up."""


@pytest.mark.parametrize("how", [how for how in Activations.__args__ if how != "none"])
def test_inputs_by_definition(how: Activations) -> None:
    """Rows of no whole groups, over five decades, of ties, and of next to nothing."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((12, 200), generator=generator)
    x[:6] *= torch.logspace(-4, 1, 6)[:, None] * torch.rand((6, 200), generator=generator)
    for row, count in enumerate((12, 8, 5, 3), start=6):
        x[row] = torch.tensor(TIES[-count:]).repeat(200)[:200]
    x[10], x[11, :32] = x[10] * 1e-9, torch.tensor([0.0, 7.0]).repeat(16)
    for scale in {"tensor-static": (0.0021, 1.0), "nvfp4": (2688 / 3.7, 1.0)}.get(how, (None,)):
        assert rounded(how, scale, x).tolist() == defined(how, scale, x.numpy())


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its largest weights are powers of two, times 21: of other scales no inverse may be exact."""
    folder = tiny_eagle3_llama(
        tmp_path_factory.mktemp("rounding") / "draft",
        hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=96,
    )  # fmt: skip
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor[0, 0] = 21 * 2.0**-3
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def inputs(width: int = 128) -> Tensor:
    return torch.randn((64, width), generator=torch.Generator().manual_seed(5))


def test_nvfp4_of_compressed_tensors_is_replayed_as_it_rounds(draft: Path, tmp_path: Path) -> None:
    """Weights and inputs, bit for bit; scales of inputs, 448 * 6 / absmax, are no powers of two."""
    pytest.importorskip("compressed_tensors")
    folder = by_compressed_tensors(draft, tmp_path / "out")
    loaded = load_draft(folder)
    assert set(loaded.activations.values()) == {"nvfp4"}
    assert len(loaded.quantized) == 7
    stored = input_scales(folder)
    assert len(set(stored.values())) > 1
    on_input = loaded.forward.on_input
    assert on_input is not None
    for canonical in loaded.quantized:
        module = canonical.replace("layers.0.", "midlayer.")
        x = inputs(loaded.weights[f"{canonical}.weight"].shape[1])
        x[0] *= 2.0**-19  # E4M3 has only zero for some of these groups
        got = on_input(canonical, x)
        assert torch.equal(got, NVFP4.rounded_inputs(x, stored[module])), canonical
        assert not got[0].all()
        assert torch.equal(loaded.weights[f"{canonical}.weight"], NVFP4.weight(folder, module))


def test_the_input_scale_that_modelopt_stores_is_inverted(draft: Path, tmp_path: Path) -> None:
    folder = quantized_folder(draft, tmp_path / "out", "blackwell-nvfp4", scale=0.0021)
    on_input, x = load_draft(folder).forward.on_input, inputs()
    assert on_input is not None
    expected = rounded("nvfp4", float(1 / np.float32(0.0021)), x)
    assert torch.equal(on_input("layers.0.mlp.up_proj", x), expected)
    assert not torch.equal(expected, rounded("nvfp4", 0.0021, x))
