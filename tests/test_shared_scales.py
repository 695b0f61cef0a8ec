"""One scale for linears that engines fuse: what is written, what `verify` says of other ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.quantized_weight import fp4_bytes
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from tiny import (
    Stored,
    fused_absmax,
    fused_with,
    read_tensors,
    store,
    tiny_eagle3_llama,
    values_of,
    write_tensors,
)
from verify_cases import assert_only_fault, faults_of

K = "midlayer.self_attn.k_proj"
FORMATS = {"blackwell-fp8": ("weight_scale", 448), "blackwell-nvfp4": ("weight_scale_2", 2688)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


def made(source: Path, name: str) -> Path:
    return quantized(source, name, source.parent / name, scale=0.01).out


@pytest.mark.parametrize("name", FORMATS)
def test_fused_linears_share_the_scale_of_their_largest_weight(source: Path, name: str) -> None:
    (suffix, divisor), before = FORMATS[name], read_tensors(source)
    after = read_tensors(made(source, name))
    scales = {
        tensor.removesuffix(f".{suffix}"): values_of(stored).item()
        for tensor, stored in after.items()
        if tensor.endswith(f".{suffix}")
    }
    assert len(scales) == 7
    for module, scale in scales.items():
        assert scale == np.float32(fused_absmax(before, module)) / np.float32(divisor)
        assert {scales[member] for member in fused_with(module)} == {scale}
    assert len(set(scales.values())) == 4


def with_own_scale(out: Path, source: Path, name: str) -> None:
    """k_proj as it would be written alone."""
    weight = read_tensors(source)[f"{K}.weight"]
    raw = torch.from_numpy(values_of(weight).copy()).to(torch.bfloat16)
    own = get_backend("torch").quantize(raw, load_recipe(name).weights)
    tensors = read_tensors(out)
    if own.global_scale is None:
        tensors[f"{K}.weight"] = stored_bytes(own.codes, "F8_E4M3")
        tensors[f"{K}.weight_scale"] = store(own.scale.reshape(()).numpy(), "F32")
    else:
        tensors[f"{K}.weight"] = stored_bytes(fp4_bytes(own.codes), "U8")
        tensors[f"{K}.weight_scale"] = stored_bytes(own.scale, "F8_E4M3")
        tensors[f"{K}.weight_scale_2"] = store(own.global_scale.numpy(), "F32")
    write_tensors(out, tensors, metadata={"format": "pt"})


def stored_bytes(tensor: torch.Tensor, dtype: str) -> Stored:
    return Stored(dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", FORMATS)
def test_engines_round_fp8_of_others_again_but_serve_their_nvfp4_wrongly(
    source: Path, name: str
) -> None:
    """In what we wrote both are faults."""
    out = made(source, name)
    with_own_scale(out, source, name)
    found = faults_of(verify(out, source, foreign=True))
    assert f"{K}.{FORMATS[name][0]}: expected absmax of midlayer.self_attn." in found
    (out / "draftquant.json").unlink()  # somebody else's folder
    report = verify(out, source, foreign=True)
    if name == "blackwell-fp8":
        assert report.faults == ()
    else:
        assert_only_fault(report, ".weight_scale_2", "expected one weight_scale_2 for fused")
