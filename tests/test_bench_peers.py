"""bench_peers: ours and others on one folder; what cannot run stands there with its error."""

import json
from pathlib import Path

import pytest
from draftquant.scripts.dev.bench_peers import PEERS, main
from tiny_dflash import tiny_dflash


@pytest.mark.slow
def test_tools_that_run_and_tools_that_do_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tiny_dflash(tmp_path / "draft")
    pythons = [f"--python={name}=/bin/false" for name in PEERS]
    work = tmp_path / "work"
    assert main([str(work), "--source", str(source), "--schemes", "fp8", "--json", *pythons]) == 0
    ours, *others = json.loads(capfd.readouterr().out)
    assert (ours["tool"], ours["found"]) == ("draftquant", "verified")
    assert ours["bytes_out"] > 0 < ours["cpu_seconds"]
    assert {row["tool"]: row["found"] for row in others} == dict.fromkeys(
        PEERS, "ended with status 1"
    )
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_an_interpreter_of_no_tool_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--python", "other=/bin/false"])
    assert "expected NAME=PATH" in capsys.readouterr().err
