"""Generated drafts of real shapes: small ones, byte for byte."""

from pathlib import Path

import pytest
from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.dev.real_shapes.__main__ import main
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft

pytestmark = pytest.mark.slow


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
