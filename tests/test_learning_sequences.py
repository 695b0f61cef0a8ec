"""What is learned from and what is held back: whole conversations, in whatever order they stand."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from draftquant.calibration.rounding.sequences import (
    MAX_SLOTS,
    MAX_VALIDATION_SLOTS,
    PromptSplit,
    chosen_prompts,
    run_together,
    split_prompts,
    training_rows,
    validation_rows,
)
from draftquant.calibration.traces.manifest import TraceEntry
from draftquant.calibration.traces.trace_folder import TraceFolder
from test_trace_sets import body, make_trace, plain, write

K = 3


def names(entries: tuple[TraceEntry, ...]) -> set[str]:
    return {entry.id for entry in entries}


def split(traces: TraceFolder, *, share: float = 0.2, seed: int = 0) -> PromptSplit:
    return split_prompts(traces, K, share=share, seed=seed)


def test_every_prompt_is_on_one_side_and_a_fifth_is_held_back(tmp_path: Path) -> None:
    found = split(write(tmp_path / "t", plain(20)))
    assert (len(found.learned), len(found.held_back)) == (16, 4)
    assert names(found.learned) | names(found.held_back) == {f"a{i}" for i in range(20)}


def test_the_order_of_prompts_and_their_names_do_not_matter(tmp_path: Path) -> None:
    prompts = plain(20)
    one = split(write(tmp_path / "one", prompts))
    other = split(write(tmp_path / "other", prompts[::-1]))
    assert [e.id for e in one.learned] == [e.id for e in other.learned]
    assert [e.id for e in one.held_back] == [e.id for e in other.held_back]
    renamed = [dataclasses.replace(trace, id=f"x{trace.id}") for trace in prompts]
    third = split(write(tmp_path / "third", renamed))
    assert [f"x{e.id}" for e in one.held_back] == [e.id for e in third.held_back]


def test_every_prompt_comes_once_before_one_comes_again(tmp_path: Path) -> None:
    prompts = write(tmp_path / "t", plain(7)).manifest.prompts
    seen = [e.id for step in range(7) for e in chosen_prompts(prompts, step, count=3, seed=0)]
    for epoch in range(3):
        assert Counter(seen[7 * epoch : 7 * epoch + 7]) == Counter(e.id for e in prompts)
    assert seen[:7] != seen[7:14]
    other = [e.id for step in range(7) for e in chosen_prompts(prompts, step, count=3, seed=1)]
    assert other != seen


def entry(num_tokens: int) -> TraceEntry:
    return TraceEntry(id="x", category="a", prompt_length=10, num_tokens=num_tokens, file="f")


@pytest.mark.parametrize(("num_tokens", "per_row"), [(14, 8), (141, 1), (142, 1), (5000, 8)])
def test_rows_are_evenly_spaced_and_few(num_tokens: int, per_row: int) -> None:
    first, last = 9, num_tokens - 1 - K  # rows 9 .. last - 1 have all K predictions
    whole = last - first
    starts = set()
    for draw in range(40):
        rows = training_rows(entry(num_tokens), K, per_row, f"0:{draw}:0")
        assert 1 <= len(rows) * per_row <= max(MAX_SLOTS, per_row)
        assert first <= rows[0] < first + rows.step
        assert rows[-1] < last
        assert rows[-1] + rows.step >= last  # none is left out at the end
        starts.add(rows[0])
    assert (len(starts) > 1) is (whole * per_row > MAX_SLOTS)
    looked = validation_rows(entry(num_tokens), K, per_row)
    assert looked[0] == first
    assert len(looked) * per_row <= MAX_VALIDATION_SLOTS
    if whole * per_row <= MAX_VALIDATION_SLOTS:
        assert looked == range(first, last)


def test_prompts_run_together_where_rows_lie_on_one_grid_and_lengths_are_alike() -> None:
    entries = [entry(n) for n in (100, 90, 300, 85, 80, 110, 95)]
    grids = [range(9, 60), range(9, 50), range(9, 200), range(9, 40), range(10, 50, 2),
             range(11, 80, 2), range(12, 60, 2)]  # fmt: skip
    found = run_together(entries, grids, max_tokens=300)
    assert sorted(map(sorted, found)) == [[0, 1, 3], [2], [4, 6], [5]]
    assert sorted(map(sorted, run_together(entries, grids, max_tokens=200))) == [
        [0], [1, 3], [2], [4, 6], [5]
    ]  # fmt: skip
    assert [len(batch) for batch in run_together(entries, grids, max_tokens=1)] == [1] * 7


def test_copies_stay_together(tmp_path: Path) -> None:
    prompts = [
        t for i in range(6) for t in (make_trace(f"a{i}", body(i)), make_trace(f"b{i}", body(i)))
    ]
    found = split(write(tmp_path / "t", prompts))
    assert {name[1:] for name in names(found.held_back)}.isdisjoint(
        {name[1:] for name in names(found.learned)}
    )
