"""bench_quality: its rows, what it asks of `quantize`, and what it says where something fails."""

import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.stored.loading import load_draft
from draftquant.scripts.api.quantize import quantize
from draftquant.scripts.api.record import record
from draftquant.scripts.dev import quality_traces
from draftquant.scripts.dev.bench_quality import (
    Bench,
    Change,
    Row,
    calibration_of,
    chosen,
    is_calibrated,
    main,
    print_rows,
)
from draftquant.scripts.dev.measured_process import BenchError
from draftquant.scripts.dev.quality_divergence import Divergence
from draftquant.scripts.dev.quality_traces import (
    Calibration,
    PairTraces,
    draftquant,
    write_prompts,
)
from draftquant.scripts.dev.training import corpus, selection
from draftquant.scripts.dev.training.corpus import Prompt
from draftquant.validate.counting.trace_replay import chosen_num_draft_tokens

pytestmark = pytest.mark.slow

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
CHANGE = Change(relative=-0.0012, lower=-0.004, upper=0.0017, verdict="PASS")


def test_a_row_is_printed_with_both_changes(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        pair="eagle3-llama",
        recipe="int4-channel",
        algorithm="gptq",
        weight_error=0.1534,
        agreement=0.975,
        divergence=0.00123,
        acceptance_length=2.8993,
        greedy=CHANGE,
        drawn=Change(relative=-0.02, lower=-0.03, upper=-0.015, verdict="FAIL"),
        cpu_seconds=4.2,
        peak_bytes=512_000_000,
    )
    print_rows([row])
    said = " ".join(capsys.readouterr().out.split())
    for word in ("0.1534", "97.50%", "2.8993", "-0.12% (-0.40%, +0.17%) PASS", "FAIL", "512",
                 "0.00123"):  # fmt: skip
        assert word in said, said


def test_prompts_decide_where_inputs_are_measured() -> None:
    assert not is_calibrated("int4-channel", "absmax")
    assert is_calibrated("int4-channel", "gptq")
    assert is_calibrated("blackwell-nvfp4", "absmax")
    assert is_calibrated("int4-channel", "quark:gptq")
    assert not is_calibrated("fp8-ptpc", "modelopt:mse")
    assert is_calibrated("int4-channel-gptq", "recipe")
    assert is_calibrated("blackwell-fp8", "recipe")
    assert not is_calibrated("int4-channel", "recipe")


def test_drawn_text_is_judged_by_drawn_proposals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each of the two is asked for, with a draft that is there already."""
    asked: list[tuple[str, str]] = []

    def judged(
        _self: Bench, _out: Path, traces: Path, sampling: str
    ) -> tuple[Change, float, float]:
        asked.append((traces.name, sampling))
        return CHANGE, 1.0, 2.9

    monkeypatch.setattr(Bench, "_judged", judged)
    monkeypatch.setattr(Bench, "_divergence", lambda *_: 0.002)
    bench = Bench(PAIR, tmp_path, 0)
    work = tmp_path / "eagle3-llama"
    for name in ("gate", "drawn", "int4-channel-absmax"):
        (work / name).mkdir()
    figures = {"weight_error": 0.1, "cpu_seconds": 2.0, "peak_bytes": 3}
    (work / "int4-channel-absmax.json").write_text(json.dumps(figures), encoding="utf-8")
    (row,) = bench.rows(["int4-channel"], ["absmax"], [Calibration()])
    assert (row.algorithm, row.cpu_seconds) == ("absmax", 2.0)
    assert asked == [("gate", "greedy"), ("drawn", "probabilistic")]
    asked.clear()
    (row,) = Bench(PAIR, tmp_path, 0, greedy_only=True).rows(
        ["int4-channel"], ["absmax"], [Calibration()]
    )
    assert (row.drawn, asked) == (None, [("gate", "greedy")])


def test_what_calibrates_is_said_and_does_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that are asked for, one after the other; a folder that is there is used."""
    asked: list[tuple[str, ...]] = []

    def run(*arguments: str) -> None:
        asked.append(arguments)
        outs = arguments[arguments.index("--out") + 1 :]
        for out in outs[: 2 if arguments[1] == "split" else 1]:
            Path(out).mkdir()

    monkeypatch.setattr(quality_traces, "draftquant", run)
    traces = PairTraces(PAIR, tmp_path, 0)
    few, code = calibration_of("12"), calibration_of("modules")
    assert (few, code) == (Calibration(count=12), Calibration(category="modules"))
    assert traces.calibration(few) == tmp_path / "calibration-by-12-prompts"
    assert traces.gate(few) == tmp_path / "gate"
    assert traces.calibration(code) == tmp_path / "calibration-by-modules"
    assert traces.gate(code) == tmp_path / "gate-by-modules-rest"
    assert traces.drawn(code) == tmp_path / "drawn-by-modules-rest"
    assert traces.calibration(Calibration()) == tmp_path / "calibration"
    assert [one[0] for one in asked] == ["record", "traces", "record", "traces", "traces",
                                         "record", "traces"]  # fmt: skip
    assert "--temperature" in asked[-2]
    assert asked[1][3:5] == ("--count", "12")
    assert asked[-1][3:5] == ("--category", "modules")


def test_more_prompts_than_a_pair_ships_are_drawn_from_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh ones stand behind the shipped 48, and none of them is known or of another split."""
    asked: list[tuple[str, ...]] = []
    splits: list[str] = []

    def held_out(_files: object, split: str, *_: object, **_how: object) -> tuple[Prompt, ...]:
        splits.append(split)
        return tuple(
            Prompt(id=str(i), category="c", token_ids=tuple(ids), text="")
            for i, ids in enumerate([shipped[0]["token_ids"], [1, 2], [3, 4]])
        )

    def select(_: object, fresh: list[Prompt], *, count: int, **_how: object) -> tuple[Prompt, ...]:
        return tuple(fresh[:count])

    lines = (PAIR / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    shipped = [json.loads(line) for line in lines]
    monkeypatch.setattr(corpus, "held_out_prompts", held_out)
    monkeypatch.setattr(selection, "first_prompts", select)
    monkeypatch.setattr(quality_traces, "draftquant", lambda *words: asked.append(words))
    traces = PairTraces(PAIR, tmp_path, 0)
    assert traces.calibration(calibration_of("50")) == tmp_path / "calibration-by-50-prompts"
    written = tmp_path / "calibration-by-50-prompts.jsonl"
    found = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert found[:48] == shipped
    assert [one["token_ids"] for one in found[48:]] == [[1, 2], [3, 4]]
    assert splits == ["calibration"]
    ((verb, *words),) = asked
    assert verb == "record"
    assert words[words.index("--prompts") + 1] == str(written)


@pytest.mark.parametrize("name", ["eagle3-llama", "dflash"])
def test_the_divergence_is_that_of_every_row_and_depth(tmp_path: Path, name: str) -> None:
    """Against one computed prompt by prompt, of two that do not have the same length."""
    pair = PAIR.parent / name
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    prompts = [json.loads(line) for line in lines]
    prompts[1] = {"id": "short", "token_ids": prompts[1]["token_ids"][:30]}
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    record(pair / "target", draft=pair / "draft", prompts=tmp_path / "p.jsonl", tables=True,
           max_new_tokens=12, out=tmp_path / "t")  # fmt: skip
    quantize(pair / "draft", "int4-channel", tmp_path / "q")
    traces = TraceFolder.open(tmp_path / "t")
    drafts = [load_draft(f, shared=traces.tables(None)) for f in (pair / "draft", tmp_path / "q")]
    count = chosen_num_draft_tokens(None, drafts)
    total, rows = 0.0, 0
    for trace in traces:
        own = whole_rows(trace.num_tokens, count, first_row=trace.prompt_length - 1)
        with torch.no_grad():
            both = [
                [
                    one.forward.logits(each.hidden[0]).double().log_softmax(-1)
                    for each in one.forward.passes(
                        first_hidden(one, traces, trace)[None],
                        trace.token_ids[None],
                        rows=own,
                        num_draft_tokens=count,
                    )
                ]
                for one in drafts
            ]
        for p, q in zip(*both, strict=True):
            total += float((p.exp() * (p - q)).sum())
            rows += p.shape[0] * p.shape[1]
    divergence = Divergence(drafts[0], traces, count)
    assert divergence.mean(drafts[1]) == pytest.approx(total / rows, rel=1e-4)
    assert total / rows > 1e-4
    assert divergence.mean(drafts[0]) == 0


def test_an_algorithm_is_that_of_the_backend_before_it() -> None:
    assert chosen("gptq") == ("--algorithm", "gptq", "--backend", "torch")
    assert chosen("quark:gptq") == ("--algorithm", "gptq", "--backend", "quark")
    uncorrected = ("--algorithm", "gptq", "--backend", "torch", "--input-correction", "off")
    assert chosen("gptq-uncorrected") == uncorrected
    assert chosen("recipe") == ()


def test_without_more_the_prompts_are_the_shipped_ones(tmp_path: Path) -> None:
    write_prompts(PAIR, tmp_path / "p.jsonl", 0)
    found = [
        json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    shipped = [
        json.loads(line)
        for line in (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert found == shipped


def test_a_target_that_loops_too_much_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def select(*_arguments: object, **_options: object) -> None:
        raise ValueError("held-out prompts: expected 1 with at most 0.25 repeated 8-grams, got 0")

    monkeypatch.setattr(selection, "first_prompts", select)
    with pytest.raises(BenchError, match=r"expected 1 with at most 0\.25") as caught:
        write_prompts(PAIR, tmp_path / "p.jsonl", 1)
    assert caught.value.fix == "ask for fewer prompts (--prompts)"
    assert not (tmp_path / "p.jsonl").exists()


def test_the_peak_is_that_of_the_command_and_not_of_who_runs_it() -> None:
    held = bytearray(b"x") * 400_000_000
    taken = draftquant("recipes", "list")
    assert "int4-channel" in taken.stdout
    assert len(held) > 2 * taken.peak_bytes > 0
    assert 0 < taken.cpu_seconds < 60


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="quantize: failed") as caught:
        draftquant("quantize", "nowhere", "--recipe", "int4-channel", "--out", "out")
    assert any("nowhere" in line for line in caught.value.details)


def test_a_pair_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "work"), "--pair", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
