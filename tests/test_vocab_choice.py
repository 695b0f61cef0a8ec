"""Choosing rows for a draft: held-out coverage, least sizes, special tokens, what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from draftquant.calibration.row_choice import (
    RowChooser,
    SaidText,
    TokenCounts,
    crosswise,
    held_out_coverage,
    read_general_counts,
    said_texts,
)
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.vocabulary_rows import (
    Choosing,
    check_same_target,
    choosing_of,
    chosen_rows,
    special_tokens,
)
from draftquant.quantize.files.hub import resolve_draft
from draftquant.recipes.errors import CalibrationError
from said_traces import VOCAB, write_said
from tiny import tiny_eagle3_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocab")
    tiny_eagle3_llama(folder / "draft", config={"eos_token_id": 90})
    tiny_eagle3_llama(folder / "half", pruned_vocabulary=True)
    write_said(folder / "traces", prompts=12)
    return folder


def choosing(folder: Path, draft: str = "draft", **given: Path | None) -> Choosing:
    arguments = {"target": None, "counts": None, **given}
    source = resolve_draft(str(folder / draft))
    return choosing_of(source, TraceFolder.open(folder / "traces"), **arguments)


def text(ids: list[int], group: int, category: str = "a") -> SaidText:
    empty = np.empty(0, dtype=np.int64)
    said = np.array(ids, dtype=np.int64)
    return SaidText(id=str(group), category=category, group=group, prompt=empty, token_ids=said)


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
    assert record.coverage_reached == by_size.coverage
    assert len(record.calibration_prompts) == 12


def test_a_coverage_that_needs_everything_or_more(folder: Path) -> None:
    texts = [text([i, i], i) for i in range(96)]
    alone = dataclasses.replace(choosing(folder), texts=texts)
    with pytest.raises(CalibrationError, match=r"100\.00% of held-out text needs all 96 rows"):
        chosen_rows(alone, None, 1.0)
    half = choosing(folder, "half")
    with pytest.raises(CalibrationError, match=r"all 48 rows of the draft \(of 96 tokens\) cover"):
        chosen_rows(half, None, 1.0)


def test_what_a_cut_draft_lacks_is_said(folder: Path) -> None:
    found = choosing(folder, "half")
    said = TokenCounts.of(said_texts(TraceFolder.open(folder / "traces")), VOCAB).pooled
    offered = list(found.chooser.offered or ())
    said[offered] = 0
    assert len(offered) == 48
    assert found.warnings[0].startswith(f"{(said > 0).sum()} tokens that the target says")
    assert set(chosen_rows(found, 20, None).target_ids) <= set(offered)
    assert choosing(folder).warnings == ()


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
    offered = set(half.chooser.offered or ())
    assert half.num_distinct == len(offered & {0, 1, 2, 3, 7}) < 5


def test_traces_of_another_target(folder: Path, tmp_path: Path) -> None:
    other = write_said(tmp_path / "traces", vocab=100)
    with pytest.raises(CalibrationError, match=r"a target of 100 tokens, random; the draft is for"):
        choosing_of(resolve_draft(str(folder / "draft")), other, target=None, counts=None)
    with pytest.raises(CalibrationError, match="was recorded with another target"):
        check_same_target(TraceFolder.open(folder / "traces"), other)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    known = TraceFolder.open(folder / "traces")
    target = dataclasses.replace(known.manifest.target, config_sha256="0" * 64)
    traces = TraceFolder(known.folder, dataclasses.replace(known.manifest, target=target))
    draft = resolve_draft(str(folder / "draft"))
    with pytest.raises(CalibrationError, match=r"has another config\.json than the target"):
        choosing_of(draft, traces, target=tmp_path, counts=None)


def test_special_tokens_of_all_configs() -> None:
    target = {"eos_token_id": [7, 3], "bos_token_id": 1, "text_config": {"eos_token_id": 9}}
    assert special_tokens([{"eos_token_id": 3}, target], 9) == (3, 7, 1)  # 9 is none of nine tokens
    assert special_tokens([{"eos_token_id": True, "bos_token_id": None}, {}], 9) == ()


def test_counts_that_are_none(tmp_path: Path) -> None:
    for content, what in {
        "[1, 2": "not JSON",
        '{"0": 1}': "expected a JSON array",
        "[1, 2, 3]": "expected 4 counts, one for each token of the target, got 3",
        "[1, 2, 3, -4]": "token 3: expected a whole number from 0 on, got -4",
        "[1, true, 3, 4]": "token 1: expected a whole number",
        "[0, 0, 0, 0]": "every count is 0",
    }.items():
        (tmp_path / "c.json").write_text(content, encoding="utf-8")
        with pytest.raises(CalibrationError, match=what):
            read_general_counts(tmp_path / "c.json", 4)
    with pytest.raises(CalibrationError, match="cannot be read: No such file"):
        read_general_counts(tmp_path / "none.json", 4)


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
