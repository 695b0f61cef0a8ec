"""Half ratios of the concat input, against drafts whose halves are scaled by a known factor."""

from pathlib import Path

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.value_lints import HalfRatio, half_ratios
from tiny import read_tensors, tiny_eagle3_llama, values_of

HIDDEN = 64
QKV = [f"midlayer.self_attn.{x}_proj.weight" for x in "kqv"]


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


def test_limit_of_harm() -> None:
    limits = {4.0: True, 3.996: False, 0.25: True, 0.2503: False}
    for ratio, harmful in limits.items():
        assert HalfRatio(name="q", ratio=ratio, num_rows=1).harmful is harmful


def test_only_layer_0_and_only_what_reads_the_concat_input(tmp_path: Path) -> None:
    """With eight heads of 16 o_proj is twice as wide as hidden too, but reads attention output."""
    folder = tiny_eagle3_llama(tmp_path / "draft", heads=8, num_layers=2)
    assert [r.name for r in half_ratios(read_draft(Checkpoint.open(folder)))] == QKV
