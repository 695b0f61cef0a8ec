"""`draftquant measure --launch`: servers that really decode, started, measured, compared."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from draftquant.calibration.server_client import Patience, ServerClient
from draftquant.scripts.cli import main
from draftquant.scripts.commands.speed_table import print_speed
from draftquant.validate.errors import MeasureError
from draftquant.validate.launch.cell_measurer import CellMeasurer
from draftquant.validate.launch.matrix import load_matrix
from draftquant.validate.launch.speed import speed_report
from draftquant.validate.measure import protocols
from draftquant.validate.measure.measure_plan import ServerAddress
from draftquant.validate.measure.measurement import ServerIdentity
from draftquant.validate.measure.measurement_file import read_measurement
from stand.decoder import PAIRS
from test_server_process import free_port
from test_speed import matrix as hand_made

PAIR = PAIRS / "eagle3-llama"
STAND = Path(__file__).parent / "launched_stand.py"
MATRIX = """\
schema_version: 1
engine: sglang
target: {target}
prompts: {prompts}
max_new_tokens: 16
command: {python} {stand} --port {{port}}
port: {port}
concurrencies: [1, 2]
repeats: 1
num_warm_up: 1
start_seconds: 120
variants:
  - name: none
    arguments: "{none}"
  - name: bf16
    draft: {draft}
    arguments: --draft {{draft}}
"""


def written(folder: Path, **changes: object) -> Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join((PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(True)[:4]),
        encoding="utf-8",
    )
    values = {
        "target": PAIR / "target", "draft": PAIR / "draft", "prompts": prompts, "stand": STAND,
        "python": sys.executable, "port": free_port(), "none": "",
    }  # fmt: skip
    path = folder / "matrix.yaml"
    path.write_text(MATRIX.format(**{**values, **changes}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_from_a_matrix_to_a_table_and_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["measure", "--launch", str(written(tmp_path)), "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert "bf16, repeat 1 of 1: concurrency 2" in printed.err
    assert (report["undrafted"], report["baseline"], report["num_prompts"]) == ("none", "bf16", 4)
    figures = {(one["variant"], one["concurrency"]): one for one in report["figures"]}
    assert set(figures) == {(name, c) for name in ("none", "bf16") for c in (1, 2)}
    for (variant, concurrency), one in figures.items():
        name = f"{variant}.c{concurrency}.r1.jsonl"
        records = read_measurement(out / "measurements" / name).records
        assert one["num_tokens"] == sum(len(record.token_ids) for record in records)
        seconds = sum(record.latency for record in records)
        per_second = concurrency * one["num_tokens"] / seconds
        assert one["tokens_per_second"]["value"] == pytest.approx(per_second)
        counts = [record.counts for record in records if record.counts]
        if variant == "none":
            assert counts == []
            assert one["acceptance_length"] is one["speed_up"] is None
        else:
            emitted = sum(count.num_emitted_tokens for count in counts)
            length = emitted / sum(count.num_steps for count in counts)
            assert one["acceptance_length"]["value"] == pytest.approx(length)
            assert length > 2
            assert one["speed_up"]["lower"] is None  # one repeat
    # All is measured: no server starts, and what is drawn is new.
    assert main([*arguments, "--plot", str(tmp_path / "speed.svg")]) == 0
    printed = capsys.readouterr()
    assert "the server starts" not in printed.err
    assert "warning: one repeat does not show" in printed.out
    assert "speed-up over none" in (tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert main([*arguments, "--plot", str(tmp_path / "speed.svg")]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_without_a_draft_that_drafts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, none=f"--draft {PAIR / 'draft'}")
    assert main(["measure", "--launch", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "none: has no draft, but its server uses one" in capsys.readouterr().err


def test_what_is_wrong_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path))
    out = ["--out", str(tmp_path / "out")]
    for arguments, what in (
        (["--launch", path], "--out: is needed with --launch"),
        (["--launch", path, *out, "--engine", "vllm"], "--engine: is said by the matrix"),
        (["--launch", path, *out, "--server", "http://a"], "--server: is said by the matrix"),
        (["--launch", path, *out, "--plot", "a.txt"], "a.txt: expected a name ending in .svg"),
        (["--launch", "none.yaml", *out], "none.yaml: cannot be read"),
        (["--plot", "a.svg", *out], "--plot: draws what --launch measures"),
        (["--launch", str(written(tmp_path, draft="/none")), *out], "/none"),
        (["--launch", str(written(tmp_path, prompts="/none")), *out], "/none"),
    ):
        assert main(["measure", *arguments]) == 2
        assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_speed(speed_report(hand_made(concurrencies=(1, 2))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vllm 0.32, m: 4 prompts, 2 repeat(s), 95 % intervals"
    for column in ("TPOT, ms", "tokens/s", "speed-up", "against bf16", "acceptance length"):
        assert column in lines[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    names = [["1", "none"], ["", "bf16"], ["", "int4"], ["2", "none"], ["", "bf16"], ["", "int4"]]
    assert [row[:2] for row in rows] == 2 * names
    assert rows[6][-2:] == ["88", "3.4"]
    assert rows[1][-3:] == ["2.000 (2.000, 2.000)", "", "2.000 (2.000, 2.000)"]
    assert rows[2][-2] == "1.250 (1.250, 1.250)"
    assert any(line.startswith("speed-up is tokens/s relative to none") for line in lines)
    assert any(line.startswith("warning: 4 prompts are few at concurrency 2") for line in lines)


class OneAtATime:
    """An engine whose server tells only sums of what it accepted."""

    most_in_flight = 1

    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, None]:
        del client
        return ServerIdentity(engine="vllm", version="0.20", model="m"), None


def test_answers_that_cannot_be_told_apart_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "get_protocol", lambda _: OneAtATime())
    matrix = load_matrix(written(tmp_path))
    server = ServerAddress(url=matrix.url, patience=Patience(attempts=1, seconds=1))
    measurer = CellMeasurer(matrix, server, {})
    with pytest.raises(MeasureError, match=r"none: only 1 request\(s\) at a time") as caught:
        asyncio.run(measurer.first_answer(matrix.variants[0]))
    assert caught.value.fix == "see 'concurrencies:'"
