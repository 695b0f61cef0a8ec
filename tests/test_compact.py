"""Drafts held as narrow as they are stored, once where they are equal, and run in BF16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.stored import loading as stored_weights
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from safetensors.torch import load_file
from torch import Tensor

PAIRS = Path(__file__).parent / "pairs"
CASES = [
    ("eagle3-llama", ""), ("eagle3-llama", "mi325x-int4-awq"), ("eagle3-mla", "mi325x-w4a8"),
    ("dflash", ""), ("eagle3-llama", "fp8-ptpc"),
]  # fmt: skip


Folders = dict[tuple[str, str], Path]
"""(family, recipe) -> the shipped draft quantized so; recipe "" is the draft itself."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root, sources = tmp_path_factory.mktemp("compact"), {f: PAIRS / f / "draft" for f, _ in CASES}
    made = {(f, r): quantized(sources[f], r, root / f"{f}-{r}").out for f, r in CASES if r}
    return {(f, ""): source for f, source in sources.items()} | made


def loaded(folder: Path, family: str, **options: Any) -> LoadedDraft:
    tensors = load_file(PAIRS / family / "target" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    shared = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    return load_draft(folder, shared=shared, **options)


def some_logits(draft: LoadedDraft) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    width = draft.weights["norm.weight"].shape[0]
    return draft.forward.logits(torch.randn((2, 9, width), generator=generator).to(draft.dtype))


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_compact_drafts_compute_the_same_bits(family: str, recipe: str, folders: Folders) -> None:
    wide = loaded(folders[family, recipe], family)
    compact = loaded(folders[family, recipe], family, compact=True)
    assert compact.weights.keys() == wide.weights.keys()
    for name, weight in compact.weights.items():
        narrow = weight.dim() == 2 and name.removesuffix(".weight") not in compact.quantized
        assert weight.dtype == (torch.bfloat16 if narrow else wide.weights[name].dtype), name
        assert torch.equal(weight.to(wide.weights[name].dtype), wide.weights[name])
    assert torch.equal(some_logits(compact), some_logits(wide))
    assert (compact.dtype, compact.device) == (torch.float32, torch.device("cpu"))


def test_weights_are_read_in_blocks(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, transposed codes (AWQ) and plain weights alike."""
    for recipe in ("", "mi325x-int4-awq", "fp8-ptpc"):
        folder = folders["eagle3-llama", recipe]
        whole = loaded(folder, "eagle3-llama")
        with monkeypatch.context() as patch:
            patch.setattr(stored_weights, "BLOCK_BYTES", 10_000 if recipe else 500_000)
            parts = loaded(folder, "eagle3-llama")
        for name, weight in whole.weights.items():
            assert torch.equal(parts.weights[name], weight), name
        assert parts.fusion_sha256 == whole.fusion_sha256


def half_a_step(*values: Tensor) -> Tensor:
    """Half the distance of BF16 values where the largest of these lies: 8 bits of mantissa."""
    largest = torch.stack([value.double().abs() for value in values]).amax(0)
    return 2.0 ** (largest.log2().floor() - 8)


def test_inputs_are_multiplied_exactly_and_rounded_once(folders: Folders) -> None:
    """FP8 per channel and token: codes times codes, summed wide, then both scales, then BF16.

    In float32, u = 2^-24, whatever the order of the sum and whether products are fused: codes times
    their scales are rounded once each, so a product has three errors of u at most, and one of K
    terms goes through K - 1 additions. So the sum is off by at most g * sum |x w| with n = K + 2
    and g = n u / (1 - n u) (Higham, Accuracy and Stability, lemma 3.1), and BF16 by half a step
    more.
    """
    folder = folders["eagle3-llama", "fp8-ptpc"]
    draft = loaded(folder, "eagle3-llama", dtype=torch.bfloat16)
    tensors, name = load_file(folder / "model.safetensors"), "self_attn.q_proj"
    codes = tensors[f"midlayer.{name}.weight"].double()
    scale = tensors[f"midlayer.{name}.weight_scale"].double().reshape(1, -1)
    x = torch.randn((40, codes.shape[1]), generator=torch.Generator().manual_seed(0)).bfloat16()
    token_scale = (x.float().abs().amax(-1, keepdim=True) / 448).double()
    inputs = (x.float() / token_scale.float()).to(torch.float8_e4m3fn).double()
    expected = (inputs @ codes.T) * token_scale * scale
    got: Tensor = draft.forward.linear(f"layers.0.{name}", x)  # type: ignore[attr-defined]
    assert got.dtype == torch.bfloat16
    errors = (codes.shape[1] + 2) * 2.0**-24
    summed = (inputs.abs() @ codes.abs().T) * token_scale * scale
    allowed = half_a_step(got, expected) + errors / (1 - errors) * summed
    assert ((got.double() - expected).abs() <= allowed).all()
    # What a narrower product would do is outside of that.
    rounded = (inputs * token_scale).bfloat16() @ (codes.T * scale).bfloat16()
    assert ((rounded.double() - expected).abs() > allowed).double().mean() > 0.1
