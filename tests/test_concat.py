"""Half ratios of the concat input, against drafts whose halves are scaled by a known factor."""

from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.value_lints import HalfRatio, half_ratios
from tiny import read_tensors, store, tiny_eagle3_llama, values_of, write_tensors

HIDDEN = 64
QKV = [f"midlayer.self_attn.{x}_proj.weight" for x in "kqv"]


def ratios(folder: Path, *, embedding: float = 1, hidden: float = 1, **options: Any) -> Any:
    """Half ratios of a tiny draft whose q, k and v halves are multiplied."""
    dtype = options.get("dtype", "BF16")
    tiny_eagle3_llama(folder, **options)
    tensors = read_tensors(folder)
    for name in QKV:
        values = values_of(tensors[name]).copy()
        values[:, :HIDDEN] *= embedding
        values[:, HIDDEN:] *= hidden
        tensors[name] = store(values, dtype)
    write_tensors(folder, tensors)
    return half_ratios(read_draft(Checkpoint.open(folder)))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("factor", "harmful"), [(1, False), (0.1, True), (10, True)])
def test_ratio_is_the_factor_between_the_halves(
    factor: float, harmful: bool, dtype: str, tmp_path: Path
) -> None:
    found = ratios(tmp_path / "draft", embedding=factor, dtype=dtype)
    assert [r.name for r in found] == QKV
    for ratio in found:
        # Row maxima of 64 Gaussians vary by 15 %: the mean of 32 rows stays within 10 %.
        assert ratio.ratio == pytest.approx(1 / factor, rel=0.1)
        assert ratio.harmful is harmful


def test_ratio_by_hand(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    found = half_ratios(read_draft(Checkpoint.open(folder)))
    tensors = read_tensors(folder)
    assert [ratio.name for ratio in found] == QKV
    for ratio in found:
        rows = abs(values_of(tensors[ratio.name]))
        low, high = rows[:, :HIDDEN].max(axis=1).mean(), rows[:, HIDDEN:].max(axis=1).mean()
        assert ratio.ratio == pytest.approx(high / low, rel=1e-6)
        assert ratio.num_rows == len(rows)


@pytest.mark.parametrize(
    ("ratio", "harmful"), [(4.0, True), (3.996, False), (0.25, True), (0.2503, False)]
)
def test_limit_of_harm(ratio: float, harmful: bool) -> None:
    assert HalfRatio(name="q", ratio=ratio, num_rows=1).harmful is harmful


def test_only_layer_0_and_only_what_reads_the_concat_input(tmp_path: Path) -> None:
    """With eight heads of 16 o_proj is twice as wide as hidden too, but reads attention output."""
    found = ratios(tmp_path / "draft", heads=8, num_layers=2)
    assert [r.name for r in found] == QKV
