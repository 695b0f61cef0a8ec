"""Choosing rows for a draft: held-out coverage, least sizes, special tokens, what is refused."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant import api as dq
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.vocabulary.row_choice import (
    RowChooser,
    RowOrder,
    SaidText,
    TokenCounts,
    crosswise,
    held_out_coverage,
    read_general_counts,
    said_texts,
)
from draftquant.calibration.vocabulary.vocabulary_rows import (
    Choosing,
    check_same_target,
    choosing_of,
    chosen_rows,
)
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import CalibrationError, GateError
from draftquant.scripts.cli import main
from draftquant.validate.comparison.right_sizes import right_sizes
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.trace_replay import replay_drafts
from said_traces import VOCAB, row_order, write_said
from test_counted_rows import shared
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocab")
    tiny_eagle3_llama(folder / "draft", config={"eos_token_id": 90})
    tiny_eagle3_llama(folder / "half", pruned_vocabulary=True)
    write_said(folder / "traces", prompts=12)
    write_said(folder / "others", prompts=12, seed=1)
    return folder


def choosing(folder: Path, draft: str = "draft", **given: Path | None) -> Choosing:
    arguments = {"target": None, "counts": None, **given}
    source = resolve_draft(str(folder / draft))
    return choosing_of(source, TraceFolder.open(folder / "traces"), **arguments)


def text(ids: list[int], group: int, category: str = "a", prompt: Sequence[int] = ()) -> SaidText:
    before, said = (np.array(some, dtype=np.int64) for some in (prompt, ids))
    return SaidText(id=str(group), category=category, group=group, prompt=before, token_ids=said)


def test_held_out_coverage_by_hand() -> None:
    """Two groups, so each is covered by the order of the other one."""
    texts = [text([0, 0, 0, 1], 0, "a"), text([1, 1, 0, 2], 1, "b")]
    found = held_out_coverage(RowChooser(vocab_size=4), texts)
    # a under [1, 0, 2, 3] reaches 1, 4, 4, 4; b under [0, 1, 2, 3] reaches 1, 3, 4, 4.
    assert found.covered.tolist() == [[0, 1, 4, 4, 4], [0, 1, 3, 4, 4]]
    assert found.of(2) == 7 / 8
    assert found.by_category(2) == {"a": 1.0, "b": 0.75}
    assert found.never_said == 1
    with pytest.raises(CalibrationError, match="its 2 prompts belong together"):
        crosswise(RowChooser(vocab_size=4), [text([0, 1], 5), text([0, 1], 5)])
    assert [found.least_size(share) for share in (0.25, 0.26, 7 / 8, 1.0)] == [1, 2, 2, 3]
    few = held_out_coverage(RowChooser(vocab_size=4, offered=(0, 1)), texts)
    assert few.least_size(1.0) is None


def test_rows_of_a_size_and_of_a_coverage(folder: Path) -> None:
    found = choosing(folder)
    held_out = held_out_coverage(found.chooser, found.texts)
    by_size = chosen_rows(found, 30, None)
    assert len(by_size.target_ids) == 30
    assert list(by_size.target_ids) == sorted(by_size.target_ids)
    assert 90 in by_size.target_ids  # the end of text, said or not
    assert by_size.held_out == held_out.of(30) < by_size.coverage
    assert by_size.worst == min(held_out.by_category(30).items(), key=lambda item: item[1])
    by_coverage = chosen_rows(found, None, by_size.held_out)
    assert len(by_coverage.target_ids) == held_out.least_size(by_size.held_out)
    assert by_coverage.held_out >= by_size.held_out
    assert (by_size.more_than_asked, by_coverage.more_than_asked) == (None, None)
    little = chosen_rows(found, None, 0.01)
    assert len(little.target_ids) == found.least
    assert f"{found.least:,} are kept, because engines" in (little.more_than_asked or "")
    assert len(chosen_rows(found, None, 0.01).target_ids) == 10  # engines take ten of one step
    record = found.record(by_size, 30, None)
    assert record.problem() is None
    assert (record.size, record.coverage, record.coverage_reached) == (30, None, by_size.coverage)
    assert found.record(little, None, 0.01).coverage == 0.01
    assert len(record.calibration_prompts) == 12


def test_rows_that_nothing_said_are_said(folder: Path) -> None:
    texts = [text([0, 1, 2], 5, category="a"), text([3, 3], 6, category="b"), text([7], 7)]
    found = dataclasses.replace(choosing(folder), texts=texts)
    assert found.said == "3 prompts (6 tokens, 5 different ones with a row)"
    assert found.warnings_of(5) == ()
    assert found.warnings_of(12) == (
        "7 of 12 rows are of tokens that were never said by what chooses them, 3 prompts (6"
        " tokens, 5 different ones with a row): record more prompts, or keep fewer rows",
    )
    half = dataclasses.replace(choosing(folder, "half"), texts=texts)
    assert half.num_distinct == len(set(half.chooser.offered or ()) & {0, 1, 2, 3, 7}) < 5


def test_traces_of_another_target(folder: Path, tmp_path: Path) -> None:
    other = write_said(tmp_path / "traces", vocab=100)
    with pytest.raises(CalibrationError):
        choosing_of(resolve_draft(str(folder / "draft")), other, target=None, counts=None)
    with pytest.raises(CalibrationError, match=rf"^{tmp_path}/traces: was .* than {folder}"):
        check_same_target(TraceFolder.open(folder / "traces"), other)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    known = TraceFolder.open(folder / "traces")
    target = dataclasses.replace(known.manifest.target, config_sha256="0" * 64)
    traces = TraceFolder(known.folder, dataclasses.replace(known.manifest, target=target))
    draft = resolve_draft(str(folder / "draft"))
    with pytest.raises(CalibrationError, match=r"has another config\.json than the target"):
        choosing_of(draft, traces, target=tmp_path, counts=None)


def test_counts_that_are_none(tmp_path: Path) -> None:
    texts = "[1, 2", '{"0": 1}', "[1, 2, 3]", "[1, 2, 3, -4]", "[1, true, 3, 4]", "[0, 0, 0, 0]"
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text, encoding="utf-8")
    for name in (*range(len(texts)), "none"):
        with pytest.raises(CalibrationError):
            read_general_counts(tmp_path / f"{name}.json", 4)


def test_general_counts_order_what_was_never_said(folder: Path, tmp_path: Path) -> None:
    counts = list(range(VOCAB))
    (tmp_path / "c.json").write_text(json.dumps(counts), encoding="utf-8")
    assert read_general_counts(tmp_path / "c.json", VOCAB).tolist() == counts
    found = choosing(folder, counts=tmp_path / "c.json")
    said = TokenCounts.of(found.texts, VOCAB).pooled
    order = found.chooser.order(found.texts).token_ids.tolist()
    unsaid = [token for token in order if not said[token] and token != 90]
    assert unsaid == sorted(unsaid, reverse=True)
    assert "general counts" in found.chooser.method


# ---- counts of what a target said, and the order of the rows


def counted(
    said: dict[str, list[int]], vocab: int = 8, prompt: tuple[int, ...] = ()
) -> TokenCounts:
    each = enumerate(said.items())
    return TokenCounts.of([text(ids, i, of, prompt) for i, (of, ids) in each], vocab)


def order(counts: TokenCounts, **chooser: Any) -> list[int]:
    return row_order(counts, **chooser).token_ids.tolist()


def test_what_is_counted_is_what_a_draft_is_to_propose(tmp_path: Path) -> None:
    """The first token of a continuation comes from the prefill; prompts are counted apart."""
    traces = write_said(tmp_path / "t", prompts=3, tokens=9)
    texts = said_texts(traces)
    for trace, text in zip(traces, texts, strict=True):
        assert text.token_ids.tolist() == trace.token_ids[trace.prompt_length + 1 :].tolist()
        assert text.prompt.tolist() == trace.token_ids[: trace.prompt_length].tolist()
        assert text.id == trace.id
    counts = TokenCounts.of(texts, VOCAB)
    assert counts.categories == ("chat", "code")
    assert counts.pooled.sum() == sum(len(text.token_ids) for text in texts)
    assert counts.by_category[0].tolist() == np.bincount(texts[1].token_ids, minlength=96).tolist()


def test_by_frequency_then_general_counts_then_prompts_then_id() -> None:
    counts = counted({"a": [3, 3, 3, 5, 5, 1]}, prompt=(6, 6, 2))
    assert order(counts) == [3, 5, 1, 6, 2, 0, 4, 7]
    assert order(counts, general=np.array([0, 0, 9, 0, 9, 0, 0, 99])) == [3, 5, 1, 7, 2, 4, 6, 0]
    # Said once each: the general counts say which first.
    assert order(counted({"a": [1, 2]}, vocab=3), general=np.array([0, 1, 9])) == [2, 1, 0]


def test_tokens_that_are_always_kept_and_those_that_a_draft_lacks() -> None:
    counts = counted({"a": [3, 3, 3, 5, 5, 1]})
    assert order(counts, always=(7, 7, 5)) == [7, 5, 3, 1, 0, 2, 4, 6]
    found = row_order(counts, offered=[1, 2, 5], always=(7,))
    assert found.token_ids.tolist() == [5, 1, 2]
    assert found.ranks.tolist() == [3, 1, 2, 3, 3, 0, 3, 3]
    assert found.first(2) == (1, 5)
    assert found.covered(counts.pooled).tolist() == [0, 2, 3, 3]  # the three 3s are out of reach


def test_no_category_starves() -> None:
    """A category with a tenth of the text and words of its own gets rows before its turn."""
    said = {"large": [0] * 40 + [1] * 30 + [2] * 20, "small": [5] * 6 + [6] * 4}
    assert order(counted(said), floor=0)[:5] == [0, 1, 2, 5, 6]
    # Behind [0] the small category has 0 of 40 %, behind [0, 5, 1] it has 60 of 76 %.
    assert order(counted(said), floor=0.95)[:5] == [0, 5, 1, 6, 2]
    assert order(counted(said), floor=0.75)[:5] == [0, 5, 1, 2, 6]
    lacking = {"large": [0] * 40 + [1] * 30, "small": [5] * 6, "tiny": [2] * 3}
    assert order(counted(lacking), offered=[0, 1, 2]) == [0, 2, 1]  # nothing of the small one's


# ---- acceptance at every size in one replay, against drafts that are really cut

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_LAYERS = (1, 3, 5)
KINDS: Mapping[str, tuple[Callable[[Path], Path], Sequence[int], int]] = {
    "chain": (tiny_eagle3_llama, (1, 3, 4), 3),
    "d2t": (lambda folder: tiny_eagle3_llama(folder, pruned_vocabulary=True), (1, 3, 4), 3),
    "block": (lambda folder: tiny_dflash(folder, num_layers=1), BLOCK_LAYERS, 7),
    "dspark": (lambda folder: tiny_dspark(folder, num_layers=1), BLOCK_LAYERS, 4),
}


def cut(draft: LoadedDraft, token_ids: Sequence[int]) -> LoadedDraft:
    """The draft with rows for some tokens only, as a folder of it would be loaded."""
    have = draft.forward.to_target(torch.arange(draft.forward.num_logits)).tolist()
    rows = torch.tensor([have.index(token) for token in sorted(token_ids)])
    specs = draft.family.tensor_specs(draft.geometry)
    shrinking = {n for n, s in specs.items() if s.shape[0].follows_from == "draft_vocab_size"}
    weights = {n: w[rows] if n in shrinking else w for n, w in draft.weights.items()}
    weights["d2t"] = torch.tensor(sorted(token_ids)) - torch.arange(len(rows))
    geometry = dataclasses.replace(draft.geometry, draft_vocab_size=len(rows))
    forward = draft.family.forward(geometry, weights, draft.forward.on_input)
    return dataclasses.replace(draft, geometry=geometry, weights=weights, forward=forward)


def orders_of(draft: LoadedDraft, traces: TraceFolder) -> list[RowOrder]:
    """By the text, and by nothing but the ids of the tokens from behind."""
    offered = draft.forward.to_target(torch.arange(draft.forward.num_logits)).tolist()
    said = TokenCounts.of(said_texts(traces), VOCAB)
    backwards = list(range(VOCAB - 1, -1, -1))
    return [row_order(said, offered=offered), row_order(said, offered=offered, always=backwards)]


def replayed(draft: LoadedDraft, traces: TraceFolder, k: int) -> list[AcceptanceCounts]:
    (found,) = replay_drafts([draft], traces, num_draft_tokens=k)
    return [prompt.counts for prompt in found.prompts]


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_at_every_size_are_those_of_a_really_cut_draft(kind: str, tmp_path: Path) -> None:
    build, layers, k = KINDS[kind]
    traces = write_said(tmp_path / "traces", layers=layers, prompts=5)
    draft = load_draft(build(tmp_path / "draft"), dtype=torch.float64, shared=shared())
    orders = orders_of(draft, traces)
    whole = draft.forward.num_logits
    found = right_sizes(draft, traces, orders, [(0, 1)] * len(traces), num_draft_tokens=k)
    assert [own[0].counts(whole) for own in found] == replayed(draft, traces, k)
    accepted = 0.0
    for number, order in enumerate(orders):
        for size in (1, 2, 5, 13, whole - 1):
            really = replayed(cut(draft, order.first(size)), traces, k)
            assert [own[number].counts(size) for own in found] == really, (number, size)
            accepted += sum(counts.num_accepted_draft_tokens for counts in really)
    assert accepted > 50


def test_equal_logits_go_to_the_lower_target_id_as_in_a_cut_draft(tmp_path: Path) -> None:
    """Rows that are equal bit by bit: products of a head with one entry in each row are exact."""
    traces = write_said(tmp_path / "traces")
    loaded = load_draft(tiny_eagle3_llama(tmp_path / "draft"), dtype=torch.float64)
    head = torch.eye(6, dtype=torch.float64)[torch.arange(VOCAB) % 6]
    weights = {**loaded.weights, "lm_head.weight": torch.nn.functional.pad(head, (0, 58))}
    forward = loaded.family.forward(loaded.geometry, weights, loaded.forward.on_input)
    draft = dataclasses.replace(loaded, weights=weights, forward=forward)
    orders = orders_of(draft, traces)
    found = right_sizes(draft, traces, orders, [(0, 1)] * len(traces), num_draft_tokens=3)
    for number, order in enumerate(orders):
        for size in (2, 20, 95):
            really = replayed(cut(draft, order.first(size)), traces, 3)
            assert [own[number].counts(size) for own in found] == really


# ---- the command


K, SIZE = 3, 24


def ask(folder: Path, *words: str) -> list[str]:
    return ["vocab", str(folder / "draft"), "--traces", str(folder / "traces"), *words]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_folder_accepts_what_the_curve_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    judged = ("--judge", str(folder / "others"), "--sizes", str(SIZE))
    curve = printed(capsys, *ask(folder, "--curve", *judged))
    verify = ("--concurrency", "1,64", "--target-step-ms", "1=0.00001,64=1000")
    assert main(ask(folder, "--curve", *judged, *verify, "--gpu", "h200")) == 0
    lines = capsys.readouterr().out.splitlines()
    others = [line for line in lines if line.startswith("for traffic like none of the traces")]
    assert len(others) == len(set(others)) == 2  # each its own gain
    written = printed(capsys, *ask(folder, "--size", str(SIZE), "--out", out))
    assert written["cut"]["size"] == len(written["rows"]["target_ids"]) == SIZE
    assert written["cut"]["verification"]["ok"]
    assert 0 < written["rows"]["held_out"] < written["rows"]["coverage"] <= 1
    (replay,) = dq.replay([out], folder / "others", num_draft_tokens=K)
    (one,) = curve["curve"]["chosen"]["whole"]
    assert (one["size"], curve["num_rows"], curve["prompts"]) == (SIZE, 96, 12)
    assert replay.counts.mean_acceptance_length == pytest.approx(one["acceptance_length"])
    assert curve["curve"]["off_domain"]["whole"][0]["size"] == SIZE
    read = curve["estimate"]["drafting_bytes"]
    # Every step of three reads 72 rows of 64 BF16 numbers less, and an offset of 8 bytes more.
    assert int(read["96"]) - int(read[str(SIZE)]) == K * (72 * 64 * 2 - 8)
    with pytest.warns(dq.DraftQuantWarning) as warned:
        again = dq.vocab(out, folder / "traces", curve=True, sizes=[12], num_draft_tokens=K)
    said = [str(one.message) for one in warned]
    assert any("have no row in the draft, which has 24" in one for one in said)
    assert any("chose the rows that the draft has (12 of them)" in one for one in said)
    with pytest.raises(GateError, match="12 of its 12 prompts chose the rows that the draft has"):
        dq.vocab(out, folder / "others", curve=True, judge=folder / "traces", sizes=[12])
    assert again.curve is not None
    assert again.curve.coverage < 1


def test_what_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        "", "--size 9 --curve", "--size 24", "--curve --out o", "--size 24 --out o --gpu h200",
        "--size 96 --out o", "--curve --sizes 24,9", "--coverage 101% --out o",
        "--curve --draft-sampling probabilistic", "--curve --counts none.json",
        "--curve --judge TRACES", "--curve --concurrency 0",
    ):  # fmt: skip
        with suppress(SystemExit):  # of the parser; the exit code is tested where all of them are
            assert main(ask(folder, *words.replace("TRACES", str(folder / "traces")).split())) == 2
        assert list(tmp_path.iterdir()) == []
