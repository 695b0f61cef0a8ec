"""How many tokens to draft: counts by hand, which number is fastest, schedules of engines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes.predictions import Proposals
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.estimate.draft_length import (
    LengthAdvice,
    LengthPoint,
    for_tensorrt_llm,
    for_vllm,
    said,
    schedule,
)
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.scripts.cli import main
from draftquant.validate.comparison.replay_file import ReplayedDraft
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_replay import DraftReplay
from draftquant.validate.counting.rounds import prompt_counts, shorter_counts
from draftquant.validate.draft_length.acceptance_of_forms import acceptance_of_forms
from draftquant.validate.draft_length.recorded_lengths import read_recorded
from draftquant.validate.errors import CompareError
from handmade_replays import replay

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"


# ---- counts


def test_shorter_rounds_begin_elsewhere() -> None:
    """Four rows that would accept 2, 0, 1 and 2 of 2 proposals; at K = 1 rounds are shorter."""
    tokens = torch.tensor([9, 1, 2, 3, 4, 5, 6])  # a prompt of one token, and how it went on
    trace = PromptTrace(
        id="hand",
        category="all",
        prompt_length=1,
        token_ids=tokens,
        features=torch.zeros(6, 1),
        target_top1=tokens[1:],
    )
    proposed = torch.tensor([[2, 3], [7, 7], [4, 7], [5, 6]])
    proposals = Proposals(token_ids=proposed, recorded_logprobs=None)
    whole = prompt_counts(trace, proposals).decoding
    assert whole.histogram == (0, 0, 2)  # rows 0 and 3
    (one,) = shorter_counts(trace, proposals)
    assert one.histogram == (0, 2)  # rows 0 and 2: row 0 accepts one of one
    assert one.mean_acceptance_length == 2


# ---- schedules


def point(k: int, speed: float, drafted: int | None = None) -> LengthPoint:
    return LengthPoint(
        num_draft_tokens=k,
        drafted=k if drafted is None else drafted,
        acceptance_length=speed,
        drafting_seconds=0.25,
        verify_seconds=0.75,
    )


def advised(concurrency: int, *points: LengthPoint, within: tuple[int, ...] = ()) -> LengthAdvice:
    best = max(points, key=lambda one: one.tokens_per_second)
    return LengthAdvice(
        form="BF16",
        own=True,
        gpu="h100",
        concurrency=concurrency,
        points=points,
        best=best,
        within=within or (best.num_draft_tokens,),
    )


CHAIN = (
    advised(1, point(1, 1.8), point(2, 2.4), point(3, 2.9)),
    advised(8, point(1, 1.8), point(2, 2.3), point(3, 2.2), within=(2, 3)),
    advised(16, point(1, 1.8), point(2, 2.3), point(3, 2.2), within=(2, 3)),
    advised(64, point(0, 2.0), point(1, 1.8), point(2, 1.7), within=(0,)),
)


def test_a_schedule_of_ranges_and_how_engines_write_it() -> None:
    ranges = schedule(CHAIN)
    assert ranges == ((1, 7, 3), (8, 63, 2), (64, 64, 0))
    assert for_vllm(ranges) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 7, 3], [8, 63, 2], [64, 64, 0]],
    }
    assert for_tensorrt_llm(ranges) == {
        "max_draft_len": 3,
        "draft_len_schedule": {"7": 3, "63": 2, "64": 0},
    }
    assert for_vllm(((1, 64, 3),)) == {"num_speculative_tokens": 3}
    assert for_vllm(((1, 64, 0),)) is None
    assert for_tensorrt_llm(((1, 64, 0),)) is None
    # Its first K must be max_draft_len, which none exceeds.
    assert for_tensorrt_llm(((1, 7, 2), (8, 64, 3))) is None


def test_a_schedule_from_a_larger_concurrency_begins_at_one() -> None:
    assert schedule((advised(8, point(2, 2.0)),)) == ((1, 8, 2),)


def test_a_schedule_of_a_block_draft_cuts_the_whole_block() -> None:
    """A shorter block of its own is no choice of a schedule: engines draft the longest."""
    several = (point(3, 2.0, 7), point(5, 2.2, 7), point(3, 2.5, 3), point(7, 2.1, 7))
    assert schedule((advised(1, *several),)) == ((1, 1, 5),)


def test_advice_in_words() -> None:
    assert said(CHAIN) == "3 at 1, 2 at 8 to 16, 0 at 64; within the bounds 2 to 3 at 8 to 16"
    assert said(CHAIN[:1]) == "3 at concurrency 1; the bounds allow no other"
    both = [advised(c, point(1, 1.0), point(3, 2.0), within=(1, 3)) for c in (1, 2)]
    assert said(both) == "3 at all concurrencies; within the bounds 1, 3 at 1 to 2"


# ---- files


def recorded(
    histograms: list[tuple[int, ...]], shorter: list[list[tuple[int, ...]]]
) -> DraftReplay:
    found = replay(histograms)
    target = replace(found.traces.target, vocab_size=1024)
    prompts = tuple(
        replace(one, shorter=tuple(AcceptanceCounts(histogram=h) for h in each))
        for one, each in zip(found.prompts, shorter, strict=True)
    )
    traces = replace(found.traces, target=target)
    return replace(found, prompts=prompts, traces=traces, family="eagle3-llama")


TWO = recorded([(4, 0, 6), (6, 0, 4)], [[(5, 8)], [(7, 6)]])
"""Of 10 steps each two tokens are accepted in 6 and in 4; at K = 1, 8 of 13 and 6 of 13."""


def written(path: Path, *replays: DraftReplay) -> str:
    found = [ReplayedDraft.of(one, rope_theta=None, dtype="float32") for one in replays]
    path.write_text(json.dumps([one.to_mapping() for one in found]), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def draft() -> Draft:
    return read_draft(Checkpoint.open(PAIR / "draft"))


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    common = ["estimate", str(PAIR / "draft"), "--gpu", "h100", "--recipe", "int4-channel"]
    assert main([*common, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_fastest_number_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "two.json", TWO)
    found = estimated(
        capsys, "--acceptance", file, "--target-step-ms", "1=0.01,8=5", "--concurrency", "1,8"
    )
    plain = found["draft_length"][0]
    assert (plain["draft"], plain["own_acceptance"]) == ("BF16", True)
    one, two = plain["by_concurrency"][1]["points"]
    # 26 steps and 14 accepted at K = 1, 20 and 20 at K = 2.
    assert one["acceptance_length"] == pytest.approx(1 + 14 / 26)
    assert two["acceptance_length"] == pytest.approx(1 + 20 / 20)
    for k, at in ((1, one), (2, two)):
        same = estimated(capsys, "-k", str(k), "--concurrency", "8", "--target-step-ms", "5")
        drafting = same["drafts"][0]["times"][0]["round_seconds"]
        assert at["drafting_seconds"] == pytest.approx(drafting)
        assert at["tokens_per_second"] == pytest.approx(
            at["acceptance_length"] / (drafting + 0.005)
        )
    assert plain["by_concurrency"][1]["num_draft_tokens"] == 2
    assert plain["vllm"] == {"num_speculative_tokens": 2}
    assert found["draft_length"][1]["draft"] == "int4-channel"
    assert not found["draft_length"][1]["own_acceptance"]
    assert "with K 2 at all concurrencies" in found["advice"]["h100"]


def test_the_verify_step_follows_the_number_of_tokens_where_it_is_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """140 GB of weights at 4,096 sequences: computing decides, 2 FLOP a weight and token."""
    file = written(tmp_path / "two.json", TWO)
    found = estimated(
        capsys, "--acceptance", file, "--target-bytes", "140e9", "--concurrency", "4096",
        "--efficiency", "1",
    )  # fmt: skip
    points = found["draft_length"][0]["by_concurrency"][0]["points"]
    assert [one["num_draft_tokens"] for one in points] == [0, 1, 2]
    for one in points:
        tokens = 4096 * (one["num_draft_tokens"] + 1)
        assert one["verify_seconds"] == pytest.approx(tokens * 140e9 / 989.5e12)
    # Two tokens a step for three times the time of one: decoding alone is the fastest.
    assert found["draft_length"][0]["by_concurrency"][0]["num_draft_tokens"] == 0
    assert found["draft_length"][0]["vllm"] is None


def test_numbers_within_the_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that disagree allow both numbers; prompts that agree allow one."""
    # In all 2.4 tokens a step at K = 2, and 2 at K = 1, which takes a quarter less time.
    differ = recorded([(0, 12, 0), (0, 0, 8)] * 4, [[(0, 12)], [(0, 12)]] * 4)
    agree = recorded([(0, 6, 4)] * 8, [[(0, 12)]] * 8)
    settings = ("--target-step-ms", "0.003", "--concurrency", "1", "--acceptance")
    both = [
        estimated(capsys, *settings, written(tmp_path / f"{i}.json", one))
        for i, one in enumerate((differ, agree))
    ]
    within = [one["draft_length"][0]["by_concurrency"][0]["within_bounds"] for one in both]
    assert within == [[1, 2], [1]]


def test_a_recipes_own_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "two.json", TWO)
    worse = recorded([(6, 0, 4), (6, 0, 4)], [[(7, 6)], [(7, 6)]])
    own = written(tmp_path / "own.json", TWO, worse)  # of a list, the last draft
    found = estimated(
        capsys, "--acceptance", file, "--acceptance", f"int4-channel={own}",
        "--target-step-ms", "5", "--concurrency", "1",
    )  # fmt: skip
    plain, int4 = found["draft_length"][:2]
    assert int4["own_acceptance"]
    lengths = [one["by_concurrency"][0]["points"][1]["acceptance_length"] for one in (plain, int4)]
    assert lengths == [pytest.approx(2.0), pytest.approx(1.8)]


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "two.json", TWO)
    command = ["estimate", str(PAIR / "draft"), "--gpu", "h100", "--recipe", "int4-channel"]
    assert main([*command, "--acceptance", file, "--target-step-ms", "5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Tokens per second of a sequence on h100, by measured acceptance" in out
    assert "K on h100 with BF16" in out
    assert '--speculative-config: {"num_speculative_tokens": 2}' in out
    assert "the verify step is as measured for every K" in out
    assert "On h100 take int4-channel" in out
    assert "of what drafting reads." in out


def test_files_of_several_numbers_of_a_block_draft(tmp_path: Path) -> None:
    """Cut blocks and shorter ones are both there; other prompts are refused."""
    path = Path(written(tmp_path / "two.json", TWO))
    (whole,) = read_recorded(path, blocks=True)
    assert [(one.num_draft_tokens, one.drafted) for one in whole.lengths] == [(1, 2), (2, 2)]
    one = recorded([(5, 8), (7, 6)], [[], []])
    (short,) = read_recorded(Path(written(tmp_path / "one.json", one)), blocks=True)
    joined = whole.joined(short)
    assert [(n.num_draft_tokens, n.drafted) for n in joined.lengths] == [(1, 1), (1, 2), (2, 2)]
    other = recorded([(5, 8)], [[]])
    (fewer,) = read_recorded(Path(written(tmp_path / "other.json", other)), blocks=True)
    with pytest.raises(CompareError, match="was counted on other prompts than"):
        whole.joined(fewer)


def test_what_0_2_wrote_counts_one_number(
    tmp_path: Path, draft: Draft, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    found = json.loads(Path(written(path, TWO)).read_text(encoding="utf-8"))
    del found[0]["family"]
    for prompt in found[0]["prompts"]:
        del prompt["shorter"]
    path.write_text(json.dumps(found), encoding="utf-8")
    known = acceptance_of_forms([str(path)], draft, ["BF16"])["BF16"]
    assert [one.num_draft_tokens for one in known.lengths] == [2]
    command = ["estimate", str(PAIR / "draft"), "--recipe", "int4-channel", "--gpu", "h100"]
    assert main([*command, "--acceptance", str(path), "--target-step-ms", "5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no other number was measured" in out
    assert "the bounds allow no other" not in out


@pytest.mark.parametrize(
    ("change", "given", "what"),
    [
        ({}, ["--acceptance", "nowhere.json"], "cannot be read"),
        ({}, ["--acceptance", "int8={file}"], "'int8' is no form that is compared: BF16, int4-"),
        ({}, ["--acceptance", "int4-channel={file}"], "no file is of the draft as it is"),
        ({}, ["--acceptance", "{file}", "-k", "3"], "3, but {file} counts up to 2"),
        ({"family": "dflash"}, ["--acceptance", "{file}"], "draft is dflash, and"),
        ({"head_online": "fp8"}, ["--acceptance", "{file}"], "vLLM makes of it (fp8): not of the"),
        (
            {"quantized": True},
            ["--acceptance", "{file}"],
            "which is quantized: not of the",
        ),
        ({"draft_vocab_size": 99}, ["--acceptance", "{file}"], "whose head has 99 rows, and that"),
        ({"vocab_size": 2048}, ["--acceptance", "{file}"], "its target has 2,048 tokens, and"),
        ({"shorter": [[1, 2, 3]]}, ["--acceptance", "{file}"], "histograms for K = 1 .. 1"),
    ],
)
def test_bad_input(
    change: dict[str, Any],
    given: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "two.json"
    found = json.loads(Path(written(path, TWO)).read_text(encoding="utf-8"))
    for key, value in change.items():
        of_draft, of_target = found[0], found[0]["traces"]["target"]
        place = {"shorter": found[0]["prompts"][0], "vocab_size": of_target}
        place.get(key, of_draft)[key] = value
    path.write_text(json.dumps(found), encoding="utf-8")
    words = [word.format(file=path) for word in given]
    command = ["estimate", str(PAIR / "draft"), "--recipe", "int4-channel"]
    assert main([*command, "--target-step-ms", "5", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert what.format(file=path) in " ".join(output.err.split())
    assert "\n  fix: " in output.err


def test_acceptance_without_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "two.json", TWO)
    command = ["estimate", str(PAIR / "draft"), "--recipe", "int4-channel", "--acceptance", file]
    assert main(command) == 2
    assert "the target's verify step, which is not known" in capsys.readouterr().err
