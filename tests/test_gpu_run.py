"""`./scripts/test --gpu` where there is no GPU: it says so; and its code, tried on the CPU."""

from pathlib import Path

import pytest
from gpu import run


def test_without_a_device_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "cuda:99", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: nothing was run (--device: there is")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", run.PARTS)
def test_every_part_runs(part: str, tmp_path: Path) -> None:
    status = run.main(["--device", "cpu", "--tiny", "--only", part, "--out", str(tmp_path)])
    text = (tmp_path / run.RESULTS).read_text(encoding="utf-8")
    assert status == 0, text
    assert f"| {part} | " in text
    assert "| well |" in text
    assert "OTHER" not in text
