"""Generated drafts of real shapes: small ones, byte for byte."""

from pathlib import Path

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.dev.real_shapes.__main__ import main
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "draft", ["kimi-k2.5-eagle3", "nvidia-kimi-k2.6-eagle3", "kimi-linear-dflash"]
)
def test_weights_look_like_weights(draft: str, tmp_path: Path) -> None:
    """Mean and standard deviation lie within five standard errors of samples of this size."""
    published = REAL_DRAFTS[draft]
    write_real_shape_draft(tmp_path / "draft", draft=draft, divide=published.divisors[-1])
    read = read_draft(Checkpoint.open(tmp_path / "draft"))
    assert {row.tensor.dtype for row in read.rows} == {"BF16"}
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    shapes = published.shapes(published.config(published.divisors[-1]))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        f"{name}.weight": shape for name, shape in shapes.items()
    }
    for name, weight in weights.items():
        values = weight.float()
        assert values.isfinite().all(), name
        if values.ndim == 1:
            assert values.mean() == pytest.approx(1, abs=5 * 0.05 / len(values) ** 0.5), name
            continue
        error = (2 * values.numel()) ** -0.5
        assert values.std() == pytest.approx(0.02, rel=5 * error), name
        assert values.abs().amax(dim=1).min() > 0, name
        assert len(values[:, :8].unique(dim=0)) == len(values), name


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        write_real_shape_draft(tmp_path / name, divide=32, seed=seed)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_a_divisor_that_would_split_heads_or_starve_ranks_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draft, divide = "kimi-k2.5-eagle3-mla", 32
    with pytest.raises(DraftQuantError, match=f"divide: expected one of .*, got {divide}"):
        write_real_shape_draft(tmp_path / "draft", draft=draft, divide=divide)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "draft"), "--draft", draft, "--divide", str(divide)])
    assert "--divide: expected one of (1, 2, 4, 8, 16" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()
