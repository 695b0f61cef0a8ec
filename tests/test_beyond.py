"""Beyond the layers: a head and an fc that a recipe quantizes, and what is refused of them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import WIDE, planned, quantized
from draftquant.quantize.backends import get_backend
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes.errors import LayoutError, PlanError
from heads import BEYOND, FUSION, HEAD, beyond
from mixes import INT4, MIXES
from tiny import read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from verify_cases import flip_bit

pytestmark = pytest.mark.usefixtures("one_thread")

BUILDERS: Mapping[str, Any] = {
    "eagle3-llama": tiny_eagle3_llama,
    "eagle3-mla": tiny_eagle3_mla,
    "dflash": tiny_dflash,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Drafts with a head and an embedding of their own; float16 ones for AWQ."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        f"{name} {dtype}": make(
            folder / f"{name}-{dtype}", dtype=dtype, head=True, embed=True, vocab=128, **WIDE[name]
        )
        for name, make in BUILDERS.items()
        for dtype in ("BF16", "F16")
    }


@pytest.fixture(scope="module")
def source(sources: Mapping[str, Path]) -> Path:
    return sources["eagle3-llama BF16"]


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("family", "name"), [(tuple(BUILDERS)[i % 3], name) for i, name in enumerate((*MIXES, *BEYOND))]
)
def test_a_folder_is_verified_audited_and_decoded(
    family: str, name: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    """A head or an fc, or linears of several formats."""
    recipe = (BEYOND | MIXES)[name]
    source = sources[f"{family} {'F16' if recipe.layout == 'awq' else 'BF16'}"]
    out = tmp_path / "out"
    plan = quantized(source, recipe, out, target_layers=8).plan
    beyond_layers = [s.row for s in plan.quantized if s.row.role in ("head", "fusion")]
    assert {row.role for row in beyond_layers} == {
        role for role, pattern in (("head", HEAD), ("fusion", FUSION))
        if any(rule.tensor == pattern for rule in recipe.rules)
    }  # fmt: skip

    report = verify(out, source)
    assert (report.faults, report.quantized) == ((), len(plan.quantized))
    audit = audit_checkpoint(Checkpoint.open(out))
    declared = audit.to_mapping()["declared"]
    assert audit.faults == ()
    assert ("targets" in declared) is ("others" in declared) >= (name in MIXES)

    loaded, bf16 = load_draft(out), load_draft(source)
    names = {f"{name}.weight" for name in loaded.quantized}
    assert names == {step.row.canonical for step in plan.quantized}
    for step in plan.quantized:
        form = plan.format_of(step)
        if form.weights.scales_whole_matrix and step.row not in beyond_layers:
            continue  # its scale is also that of what it is fused with
        exact = bf16.weights[step.row.canonical]
        absmax = exact.abs().amax().reshape(1, 1) if form.weights.scales_whole_matrix else None
        dtype = torch.float16 if recipe.layout == "awq" else torch.bfloat16
        codes = get_backend("torch").quantize(exact.to(dtype), form.weights, absmax)
        found = loaded.weights[step.row.canonical]
        # The inverse of NVFP4's global scale is stored in compressed-tensors.
        torch.testing.assert_close(found, codes.dequantized(), rtol=2**-22, atol=0)
        assert not torch.equal(found, exact)


def test_a_head_and_an_fc_that_cannot_be_quantized(source: Path, tmp_path: Path) -> None:
    """In a layout in which no engine reads it, tied by config.json, and by learned rounding."""
    config = {"tie_word_embeddings": True}
    tied = tiny_eagle3_llama(tmp_path / "draft", config=config, **WIDE["eagle3-llama"])
    own, fc = BEYOND["quark-fp8-fc"].formats[0], beyond("learned", INT4, fusion=INT4)
    learned = dataclasses.replace(fc.algorithm, scale="mse", rounding="learned")
    for draft, recipe in (
        (source, beyond("head", own, head=own, layout="quark")),
        (tied, BEYOND["fp8-head"]),
        (source, dataclasses.replace(fc, algorithm=learned)),
    ):
        with pytest.raises((PlanError, LayoutError)):
            planned(draft, recipe)


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **WIDE["eagle3-llama"])
    tensors = read_tensors(source)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    write_tensors(source, tensors, metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"it equals embed_tokens\.weight byte for byte"):
        quantized(source, BEYOND["fp8-head"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tensors["lm_head.weight"] = flip_bit(tensors["lm_head.weight"], 8 * 2 * 128 * 95)
    write_tensors(source, tensors, metadata={"format": "pt"})
    quantized(source, BEYOND["fp8-head"], tmp_path / "out")
