"""DFlash folders quantized, copied and loaded, with the side files that engines read."""

from pathlib import Path

import pytest
import torch
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from tiny_dflash import tiny_dflash
from torch import Tensor


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "draft", num_layers=2)


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


class NotPlain:
    """What `weights_only` refuses to unpickle."""


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        (NotPlain(), "torch cannot read it as plain tensors: "),
        (b"no archive", "torch cannot read it as plain tensors: "),
        ([torch.zeros(64)], "expected a floating-point 'embedding', got list"),
        (torch.zeros(7, 64), "expected 64 values, got shape [7, 64]"),
        ({"embedding": torch.zeros(64), "mask_token_id": 3}, "expected mask_token_id 95, got 3"),
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
