"""DFlash folders quantized, copied and loaded, with the side files that engines read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from data_free import LAYERS_ALONE
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, Plan, make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError
from tiny_dflash import README, tiny_dflash
from torch import Tensor
from wide import dimensions


def plan_of(folder: Path, recipe: str) -> Plan:
    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    return make_plan(chosen, read_draft(Checkpoint.open(folder)))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "draft", num_layers=2)


# The way to an output


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


VARIANTS: dict[str, dict[str, Any]] = {
    "published": {"mask_embedding": True},
    "sharded-torchspec": {"spelling": "torchspec", "sharded": True},
    "speculators-tables": {"embed": True, "pruned_vocabulary": True, "spelling": "model"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", LAYERS_ALONE)
def test_every_recipe_quantizes_35_linears_and_verifies(
    recipe: str, variant: str, tmp_path: Path
) -> None:
    wide = dimensions("dflash", recipe)
    source = tiny_dflash(tmp_path / "draft", **VARIANTS[variant] | wide)
    before = files(source)
    plan = plan_of(source, recipe)
    assert len(plan.quantized) == 35
    modules = [step.row.tensor.name.removesuffix(".weight") for step in plan.quantized]
    scales = dict.fromkeys(modules, 0.25) if plan.recipe.needs_input_scales else {}
    out = tmp_path / "out"
    report = quantize_draft(
        plan, out, source=DraftSource(folder=source), measured=Measured(input_scales=scales)
    )
    assert report.verification.ok
    assert verify(out, source).ok
    assert files(source) == before
    travelled = {"README.md", "dflash.py"} | ({"mask_embedding.pt"} & before.keys())
    assert {name: files(out)[name] for name in travelled} == {n: before[n] for n in travelled}
    assert files(out)["README.md"] == README.encode()
    tables = shared(96, wide.get("hidden", 64))
    quantized = load_draft(out, shared=tables)
    assert len(quantized.quantized) == 35
    assert quantized.fusion_sha256 == load_draft(source, shared=tables).fusion_sha256


@pytest.mark.parametrize(
    "file",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
     "consolidated.00.pth", "last.ckpt", "draft.gguf"],
)  # fmt: skip
def test_weights_in_another_format_do_not_travel(file: str, draft: Path, tmp_path: Path) -> None:
    (draft / file).write_bytes(b"weights")
    plan = plan_of(draft, "fp8-ptpc")
    with pytest.raises(CheckpointError, match="another format would travel unquantized") as caught:
        quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=draft))
    assert caught.value.where == str(draft / file)
    assert "move this file" in caught.value.fix
    assert not (tmp_path / "out").exists()


# Loading


def shared(rows: int, hidden: int = 64) -> dict[str, Tensor]:
    """Embedding and head of a target with so many tokens."""
    table = torch.arange(rows * hidden, dtype=torch.float32).reshape(rows, hidden) / 1000
    return {"embed_tokens.weight": table, "lm_head.weight": -table}


def test_embedding_and_head_come_from_the_target(draft: Path) -> None:
    loaded = load_draft(draft, shared=shared(96))
    assert torch.equal(loaded.weights["embed_tokens.weight"], shared(96)["embed_tokens.weight"])
    assert torch.equal(loaded.weights["lm_head.weight"], shared(96)["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"the draft does not store embed_tokens.weight"):
        load_draft(draft)
    with pytest.raises(
        CheckpointError, match=r"expected shape \[96, 64\], the target's is \[95, 6"
    ):
        load_draft(draft, shared=shared(95))


def test_an_embedding_of_the_drafts_own_goes_before_the_targets(tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", num_layers=1, embed=True, head=True)
    loaded = load_draft(folder, shared=shared(96))
    for name, table in shared(96).items():
        assert not torch.equal(loaded.weights[name], table)


def test_the_mask_embedding_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", num_layers=1, mask_embedding=True)
    saved = torch.load(folder / "mask_embedding.pt", weights_only=True)["embedding"]
    loaded = load_draft(folder, shared=shared(96), dtype=torch.float64)
    assert torch.equal(loaded.weights["mask_embedding"], saved.double())
    torch.save(saved[None], folder / "mask_embedding.pt")  # a bare tensor, which vLLM reads too
    assert torch.equal(load_draft(folder, shared=shared(96)).weights["mask_embedding"], saved)
    (folder / "mask_embedding.pt").unlink()
    assert "mask_embedding" not in load_draft(folder, shared=shared(96)).weights


class NotPlain:
    """What `weights_only` refuses to unpickle."""


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        (NotPlain(), "torch cannot read it as plain tensors: "),
        (b"no archive", "torch cannot read it as plain tensors: "),
        (b"", "torch cannot read it as plain tensors: "),
        ([torch.zeros(64)], "expected a floating-point 'embedding', got list"),
        ({"mask_token_id": 95}, "expected a floating-point 'embedding', got NoneType"),
        (torch.zeros(64, dtype=torch.int64), "expected a floating-point 'embedding', got Tensor"),
        (torch.zeros(7, 64), "expected 64 values, got shape [7, 64]"),
        ({"embedding": torch.zeros(64), "mask_token_id": 3}, "expected mask_token_id 95, got 3"),
        ({"embedding": torch.zeros(7, 64), "per_position": True}, "one embedding per position"),
        (torch.full((64,), torch.nan), "holds NaN or infinity"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_mask_embeddings_that_engines_would_not_load(
    saved: object, what: str, tmp_path: Path
) -> None:
    folder = tiny_dflash(tmp_path / "draft", num_layers=1)
    path = folder / "mask_embedding.pt"
    if isinstance(saved, bytes):
        path.write_bytes(saved)
    else:
        torch.save(saved, path)
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, shared=shared(96))
    assert caught.value.where == str(path)
    assert what in caught.value.what
    assert "with its mask embedding" in caught.value.fix
