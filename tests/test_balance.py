"""Balancing the concat input: exact, only where it helps, and what it wins."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.value_lints import balance_exponent
from draftquant.quantize.making.execute import divide_norm, multiply_columns
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import BackendError
from tiny import read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from tiny_mla import tiny_eagle3_mla
from verify_cases import quantized_folder

HIDDEN = 64
NORM = "midlayer.input_layernorm.weight"
CONCAT = {"llama": ("q_proj", "k_proj", "v_proj"), "mla": ("q_a_proj", "kv_a_proj_with_mqa")}
BUILDERS = {"llama": tiny_eagle3_llama, "mla": tiny_eagle3_mla}


def unbalanced(folder: Path, family: str, factor: float, **options: Any) -> Path:
    """A tiny draft whose embedding half is `factor` times as large as its hidden half."""
    BUILDERS[family](folder, **options)
    tensors = read_tensors(folder)
    for leaf in CONCAT[family]:
        name = f"midlayer.self_attn.{leaf}.weight"
        values = values_of(tensors[name]).copy()
        values[:, :HIDDEN] *= factor
        tensors[name] = store(values, "BF16")
    write_tensors(folder, tensors, metadata={"format": "pt"})
    return folder


def small_half_error(source: Path, out: Path, family: str) -> float:
    """Relative L2 error of the embedding halves in what `out` serves: weight x norm."""
    original, stored = read_tensors(source), StoredDraft.read(Checkpoint.open(out))
    norms = [values_of(read_tensors(f)[NORM]).astype(np.float64) for f in (source, out)]
    lost = total = 0.0
    for leaf in CONCAT[family]:
        row = stored.draft.row(f"layers.0.self_attn.{leaf}.weight")
        assert row is not None
        served = stored.linear(row).decoded().dequantized()[:, :HIDDEN] * norms[1]
        exact = values_of(original[row.tensor.name])[:, :HIDDEN] * norms[0]
        lost += float(((served - exact) ** 2).sum())
        total += float((exact**2).sum())
    return float((lost / total) ** 0.5)


def test_halves_16_apart_keep_both(tmp_path: Path) -> None:
    source, on = unbalanced(tmp_path / "draft", "mla", 1 / 16), load_recipe("mi325x-w4a8")
    off = replace(on, algorithm=replace(on.algorithm, balance_concat="off"))
    for recipe, least, most in ((on, 0, 0.25), (off, 0.9, 1.1)):
        out = quantized_folder(source, tmp_path / str(most), recipe)
        assert least < small_half_error(source, out, "mla") < most


def test_exponents_by_hand() -> None:
    for ratio, exponent in ((1 / 16, -4), (0.25, -2), (4.0, 2), (15.0, 4)):
        assert balance_exponent([ratio]) == exponent
    assert balance_exponent([16.0, 16.0, 16.0]) == 4
    assert balance_exponent([3.99, 1.0]) == 0
    assert balance_exponent([1 / 8, 1 / 2]) == -2
    assert balance_exponent([4.0, 64.0]) == 4  # half way: both end 4 away from even
    assert balance_exponent([float("inf"), 0.0]) == 0  # a half of zeros has no size
    assert balance_exponent([float("inf"), 16.0]) == 4
    assert balance_exponent([]) == 0


def test_what_the_dtype_cannot_hold_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"it cannot be multiplied by 2\^-3 exactly"):
        # A subnormal of float16.
        divide_norm(torch.tensor([[2.0**-24 * 3, 1.0]], dtype=torch.float16), 3, "x")
    with pytest.raises(BackendError, match=r"by 2\^1 exactly in torch.float16"):
        multiply_columns(torch.tensor([[40000.0, 1.0]], dtype=torch.float16), 1, "x")
