"""`quantize --recipe auto`: which recipes are tried, which one is chosen, what a stop loses."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corpus
import draftquant.api as dq
import pytest
from draftquant.quantize.asked import Quantizing
from draftquant.quantize.inspection import open_draft
from draftquant.scripts.cli import main
from draftquant.validate.comparison.recipe_contenders import contenders
from draftquant.validate.comparison.recipe_selection import Contender, Selection, page, rows, tried
from draftquant.validate.judging.candidate_origin import DraftFolder, calibrated_elsewhere
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.runs import auto_run
from handmade_replays import BASELINE, RELEASE, noisy, replay
from test_unknown_family import draft as unknown_draft
from told import check_told, lines_of

PAIR = corpus.PAIRS / "eagle3-llama"
WORDS = ["quantize", str(PAIR / "draft"), "--recipe", "auto", "--engine", "sglang",
         "--gpu", "mi325x"]  # fmt: skip
HERE: Mapping[str, Any] = {"engine": "sglang", "gpu": "mi325x"}
LOSSES = {"none": (0, 2), "little": (8, 1), "open": (16, 40), "much": (80, 2)}
"""Kept in mind by name: tokens lost per prompt of about 1,600, and their noise."""


def report(loss: str) -> GateReport:
    return judge(replay(BASELINE), replay(noisy(*LOSSES[loss])), RELEASE)


def test_the_losses_are_what_they_are_called() -> None:
    verdicts = {loss: report(loss).verdict for loss in LOSSES}
    assert verdicts == {"none": "PASS", "little": "PASS", "open": "INCONCLUSIVE", "much": "FAIL"}


def selection(
    recipes: Mapping[str, tuple[float, str]], verify: float | None
) -> tuple[Selection, list[str]]:
    """Tried, with recipes by drafting time and loss, beside a draft that takes 10; who was made."""

    def contender(name: str, seconds: float) -> Contender:
        return Contender(name=name, stored_bytes=1, drafting_seconds=seconds)

    made: list[str] = []

    def judged(one: Contender) -> GateReport:
        made.append(one.name)
        return report(recipes[one.name][1])

    before = Selection(
        engine="vLLM",
        gpu="H200",
        unquantized=contender("BF16", 10),
        contenders=tuple(contender(name, time) for name, (time, _) in recipes.items()),
        left_out={},
        verify_seconds=verify,
    )
    return tried(before, judged), made


@pytest.mark.parametrize(
    ("recipes", "verify", "made", "chosen"),
    [
        # The first that passes is the fastest: the next cannot win, nor can an equally fast one.
        ({"a": (5, "none"), "b": (5, "none"), "c": (7, "none")}, None, "a", "a"),
        ({"a": (5, "much"), "b": (6, "open"), "c": (7, "little"), "d": (8, "none")}, None, "abc",
         "c"),
        # None passes: the fastest that is not shown to fail; or none at all.
        ({"a": (5, "much"), "b": (6, "open"), "c": (7, "open")}, None, "abc", "b"),
        ({"a": (5, "much"), "b": (6, "much")}, None, "ab", None),
        # Nothing that is slower than the draft as it is.
        ({"a": (10, "none"), "b": (11, "none")}, None, "", None),
        # Beside a long verify step what is accepted decides: 0.5 % more beats 1 of 1,000.
        ({"a": (5, "little"), "b": (6, "none")}, 990, "ab", "b"),
        ({"a": (5, "little"), "b": (6, "none")}, 10, "a", "a"),
        ({"a": (5, "open"), "b": (6, "little")}, 990, "ab", "b"),
    ],
)  # fmt: skip
def test_what_could_win_is_made_and_the_fastest_that_passes_is_chosen(
    recipes: Mapping[str, tuple[float, str]], verify: float | None, made: str, chosen: str | None
) -> None:
    found, were_made = selection(recipes, verify)
    assert "".join(were_made) == made
    assert (found.chosen and found.chosen.name) == chosen
    marked = [row[0] for row in rows(found) if row[-1].endswith("chosen")]
    assert marked == ([chosen] if chosen else [])
    assert json.loads(json.dumps(found.to_mapping()))["chosen"] == chosen


def test_what_is_told_of_a_choice() -> None:
    won, open_yet = {"a": (5, "open"), "b": (6, "little"), "c": (7, "none")}, {"a": (4, "open")}
    cases = {"won": (won, 1e-3), "open": (open_yet, None), "lost": ({"a": (3, "much")}, 2e-6)}
    found = {name: selection(*case)[0] for name, case in cases.items()}
    told = {
        name: [one.told, one.ordered_by, *map(" | ".join, rows(one)), *lines_of(one.to_mapping()),
               page(one, "D").partition("<body")[2]]
        for name, one in found.items()
    }  # fmt: skip
    check_told("auto", {name: "\n".join(lines) for name, lines in told.items()})


@pytest.mark.parametrize(
    ("gpu", "more", "order", "left_out"),
    [
        ("h200", {}, ["int4-channel-gptq", "int4-channel", "mxfp4-weights", "mi355-mxfp4"], ""),
        ("b200", {}, ["int4-channel-gptq", "blackwell-fp8-mla"], "fp8-ptpc"),
        ("b200", {"head": True}, ["int4-group128-gptq-head", "int4-channel-gptq"], "fp8-ptpc"),
        # Computing decides: rounded inputs are multiplied faster.
        ("b200", {"concurrency": 4096}, ["blackwell-nvfp4", "blackwell-fp8", "int4-channel"], ""),
    ],
)  # fmt: skip
def test_contenders_stand_by_time_and_of_equal_ones_what_rounds_less_comes_first(
    gpu: str, more: dict[str, Any], order: list[str], left_out: str
) -> None:
    asked = Quantizing(PAIR / "draft", "auto", "out", engine="vllm", gpu=gpu, **more)
    found, plans = contenders(open_draft(asked.draft)[1], asked)
    names = [one.name for one in found.contenders]
    times = [float(f"{one.drafting_seconds:.6e}") for one in found.contenders]
    assert [name for name in names if name in order] == order
    assert times == sorted(times)
    assert plans.keys() >= set(names)
    assert left_out in ("", *found.left_out)


@pytest.fixture(scope="module")
def traces() -> Path:
    return corpus.traces("eagle3-llama", prompts=60, max_new_tokens=40)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes by which drafts are made, in order."""
    names: list[str] = []
    real = auto_run.quantize_as_asked

    def counting(asked: Any, *chosen: Any) -> Any:
        names.append(asked.recipe.name)
        return real(asked, *chosen)

    monkeypatch.setattr(auto_run, "quantize_as_asked", counting)
    return names


def test_a_stop_loses_the_draft_at_work_and_the_record_says_what_chose(
    traces: Path,
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "cache"))
    out, page = tmp_path / "out", tmp_path / "page.html"
    given = {**HERE, "traces": traces, "target_step_ms": 0.01, "fix_config": True}
    replayed = auto_run.replay_loaded

    def stopped(*asked: Any) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        return replayed(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(auto_run, "replay_loaded", stopped)
        for precise in (True, False):  # what one keeps is nothing to the other
            with pytest.raises(KeyboardInterrupt):
                dq.quantize(PAIR / "draft", "auto", out, precise=precise, **given)
            first, second = made
            made.clear()
            assert first == "mi325x-fp8"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    words = [*WORDS, "--traces", str(traces), "--out", str(out), "--html", str(page)]
    assert main([*words, "--target-step-ms", "0.01", "--fix-config", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert first == said["selection"]["contenders"][0]["name"]
    assert first not in made[:-1]  # what it accepted was kept
    assert made[0] == second
    assert made[-1] == said["recipe"] == said["selection"]["chosen"]
    assert "cannot win" in page.read_text("utf-8")
    # The record: all prompts were seen, those that calibrated and those that chose.
    with pytest.raises(dq.DraftQuantError, match="60 of its 60 prompts chose the candidate's rec"):
        dq.gate(PAIR / "draft", out, traces)
    candidate = DraftFolder.read(out)
    assert candidate.quantized_by is not None
    among = candidate.quantized_by.chosen
    assert str(among) == "chosen among 3 by 42 prompts"
    assert among is not None
    assert among.prompts.target is not None
    other = dataclasses.replace(among.prompts.target, name="other", config_sha256="0" * 64)
    assert "not other" in calibrated_elsewhere(candidate, other)[0]
    card = dq.card(out, base_model="a/draft", license="mit")
    assert "The recipe was chosen among 3 by 42 prompts, which judge nothing more." in card
    assert dq.verify(out, against=PAIR / "draft").ok


def test_where_every_recipe_fails_the_error_has_the_table(
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = report("much")
    monkeypatch.setattr(auto_run, "tried", lambda before, _judge: tried(before, lambda _: lost))
    assert main([*WORDS, "--traces", str(traces), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert re.search(r"mi325x-fp8: 2.27 MB 1.2 µs -\d.* FAIL", said)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:family unknown")
@pytest.mark.parametrize(
    "changed",
    [
        {"engine": None}, {"gpu": None}, {"traces": None}, {"algorithm": "gptq"},
        {"vocab_size": 100}, {"recipe": "fp8-ptpc"}, {"gpu": "a100"}, {"gpu": "h2000"},
        {"engine": "tensorrt-llm", "gpu": "h200"}, {"traces": 12}, {"draft": "unknown"},
    ],
)  # fmt: skip
def test_what_leads_to_no_choice_says_the_way_on(changed: dict[str, Any], tmp_path: Path) -> None:
    if changed.get("traces") == 12:
        changed = {"traces": corpus.traces("eagle3-llama")}
    if changed.get("draft") == "unknown":
        changed = {"draft": unknown_draft("eagle", tmp_path / "unknown")}
    given = {"draft": PAIR / "draft", "recipe": "auto", "traces": tmp_path, **HERE, **changed}
    with pytest.raises(dq.DraftQuantError):
        dq.quantize(out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
