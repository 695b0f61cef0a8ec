"""bench_rerolled: what it prints of variants, and that it wants trained pairs."""

from pathlib import Path

import pytest
from draftquant.scripts.dev.bench_rerolled import Rerolled, main, print_rows

pytestmark = pytest.mark.slow


def test_a_row_has_the_spread_of_the_variants(capsys: pytest.CaptureFixture[str]) -> None:
    changes = (-0.03, -0.01, -0.02)
    row = Rerolled(pair="pair", recipe="int4-channel", changes=changes, half_width=0.006)
    assert row.deviation == pytest.approx(0.01)
    print_rows([row])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "pair int4-channel 3 -2.00% -3.00% -1.00% 1.00% 0.60%" in said


def test_a_folder_that_is_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "work"), "--pair", str(tmp_path)]) == 2
    assert "is no trained pair" in capsys.readouterr().err
