"""What kernels see of inputs, format by format: by hand, by definition, and by compressed-tensors.

The definitions here are in plain Python: every value a format has, and the nearest of them.
"""

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

Rows = Sequence[Sequence[float]]

# ---- by hand

TIES = [448.0, 17.0, -19.0, 2.0**-10]
"""Under scale 1: the largest, two ties to even, and half of the smallest subnormal."""
TIES_ROUNDED = [448.0, 16.0, -20.0, 0.0]
SMALL = [3.5, 2.0**-10, -19 / 128, 0.0]
"""Exact under 3.5 / 448 = 1/128 but for the tie 19; under scale 1 the second one is zero."""
NVFP4_GROUP = [6.375, 2.5, 3.5, -0.25]
"""6.375 / 6 = 1.0625 is half way between 1 and 1.125 of E4M3: to even, so that the scale is 1."""
MXFP4_GROUP = [6.0, 2.5, 1.5, -0.75]
"""6 = 1.5 * 4: the scale is 4 / 4, and codes 2.5 and 0.75 are ties to even."""

GOLDEN: dict[str, tuple[Activations, float | None, Rows, Rows]] = {
    "fp8 static": (
        "tensor-static", 0.5, [[8.5, 9.5, -224.0, 1000.0, 2.0**-11]], [[8, 10, -224, 224, 0]]
    ),
    "fp8 per tensor": (
        "tensor-dynamic", None, [TIES, SMALL], [TIES_ROUNDED, [3.5, 0.0, -0.15625, 0.0]]
    ),
    "fp8 per token": (
        "token-dynamic", None, [TIES, SMALL], [TIES_ROUNDED, [3.5, 2.0**-10, -20 / 128, 0.0]]
    ),
    "fp8 per group": (
        "group-dynamic",
        None,
        [[*TIES, *[0.0] * 124, *SMALL]],
        [[*TIES_ROUNDED, *[0.0] * 124, 3.5, 2.0**-10, -20 / 128, 0.0]],
    ),
    "nvfp4": (
        "nvfp4",
        1.0,
        [[*NVFP4_GROUP, *[0.0] * 12, 12.75, 5.0, 7.0, -0.5]],
        [[6, 2, 4, 0, *[0.0] * 12, 12, 4, 8, 0]],
    ),
    # 9 / 6 * 3 = 4.5 of E4M3, over 3 again 1.5.
    # 2^-8 / 6 lies below half of 2^-9: E4M3 has zero for it, and kernels multiply by zero.
    "nvfp4 of next to nothing": (
        "nvfp4", 1.0, [[2.0**-8, -(2.0**-9), 0.0, 2.0**-10]], [[0, 0, 0, 0]]
    ),
    # 7 = 1.75 * 4 rounds up to 8 with one bit of mantissa: the scale is 8 / 4.
    "mxfp4 rounded up": ("mxfp4", None, [[7.0, 2.5, 1.5, -0.5]], [[8, 2, 2, 0]]),
    "mxfp4 groups": (
        "mxfp4",
        None,
        [[*MXFP4_GROUP, *[0.0] * 28, 0.75, 0.3125, 0.1875, 3 / 32]],
        [[6, 2, 1.5, -1, *[0.0] * 28, 0.75, 0.25, 0.1875, 0.125]],
    ),
}  # fmt: skip


def rounded(how: Activations, scale: float | None, x: Tensor) -> Tensor:
    scales = {} if scale is None else {"q": torch.tensor(scale)}
    return InputRounding({"q": how}, scales, None)("q", x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GOLDEN)
def test_inputs_by_hand(case: str, dtype: torch.dtype) -> None:
    how, scale, inputs, expected = GOLDEN[case]
    x = torch.tensor(inputs)
    assert torch.equal(x.to(dtype).float(), x), "the inputs of this table are exact in BF16"
    got = rounded(how, scale, x.to(dtype))
    assert got.dtype == torch.float32  # a code times its scale
    assert got.tolist() == [list(row) for row in expected]


# ---- by definition

E4M3 = sorted(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""In the order of their codes, so that an even place is an even mantissa."""


def nearest(value: float, of: Sequence[float]) -> float:
    """Ties to the even code; beyond the last value, the last."""
    size = min(abs(value), of[-1])
    place = min(range(len(of)), key=lambda i: (abs(of[i] - size), i % 2))
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
            values += [float(f32(nearest(f32(v / step), grid)) * step) for v in piece]
        out.append(values)
    return out


@pytest.mark.parametrize("how", [how for how in Activations.__args__ if how != "none"])
def test_inputs_by_definition(how: Activations) -> None:
    """Rows of no whole groups, over five decades, static scales that are no powers of two."""
    scale = {"tensor-static": 0.0021, "nvfp4": 2688 / 3.7}.get(how)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((6, 200), generator=generator)
    x *= torch.logspace(-4, 1, 6)[:, None] * torch.rand((6, 200), generator=generator)
    assert rounded(how, scale, x).tolist() == defined(how, scale, x.numpy())


# ---- folders


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose largest weights are powers of two, times 21: so are NVFP4's scales of matrices.

    A layout that stores the inverse of any other may hold none that gives it back.
    """
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


# ---- compressed-tensors itself


def test_nvfp4_of_compressed_tensors_is_replayed_as_it_rounds(draft: Path, tmp_path: Path) -> None:
    """The folder that its own compressor writes: weights and inputs, bit for bit.

    Its static scales of inputs are 448 * 6 / absmax, no powers of two.
    """
    pytest.importorskip("compressed_tensors")
    folder = by_compressed_tensors(draft, tmp_path / "out")
    loaded = load_draft(folder)
    assert set(loaded.activations.values()) == {"nvfp4"}
    assert len(loaded.quantized) == 7
    stored = input_scales(folder)
    assert len(set(stored.values())) > 1
    for canonical in loaded.quantized:
        module = canonical.replace("layers.0.", "midlayer.")
        x = inputs(loaded.weights[f"{canonical}.weight"].shape[1])
        x[0] *= 2.0**-19  # E4M3 has only zero for some of these groups
        on_input = loaded.forward.on_input
        assert on_input is not None
        got = on_input(canonical, x)
        assert torch.equal(got, NVFP4.rounded_inputs(x, stored[module])), canonical
        assert not got[0].all()
        assert torch.equal(loaded.weights[f"{canonical}.weight"], NVFP4.weight(folder, module))
