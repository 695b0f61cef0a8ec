"""Counts of what a target said, and the order of the rows: frequency, floors, and what ties."""

from pathlib import Path

import numpy as np
from draftquant.calibration.row_choice import SaidText, TokenCounts, folds_of, said_texts
from said_traces import VOCAB, row_order, write_said


def counted(
    said: dict[str, list[int]], vocab: int = 8, prompt: tuple[int, ...] = ()
) -> TokenCounts:
    texts = [
        SaidText(
            id=category,
            category=category,
            group=i,
            prompt=np.array(prompt, dtype=np.int64),
            token_ids=np.array(ids, dtype=np.int64),
        )
        for i, (category, ids) in enumerate(said.items())
    ]
    return TokenCounts.of(texts, vocab)


def order(*args: object, **kwargs: object) -> list[int]:
    return row_order(*args, **kwargs).token_ids.tolist()  # type: ignore[arg-type]


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


def test_folds_keep_groups_together_and_spread_every_category(tmp_path: Path) -> None:
    texts = said_texts(write_said(tmp_path / "t", prompts=10, tokens=9))
    texts += texts[:2]  # copies: the same groups
    folds = folds_of(texts, 5)
    assert folds[10:] == folds[:2]
    assert sorted(folds[:10]) == sorted([*range(5)] * 2)
    for category in ("code", "chat"):
        own = [fold for fold, text in zip(folds, texts, strict=True) if text.category == category]
        assert set(own) == set(range(5))


def test_by_frequency_then_general_counts_then_prompts_then_id() -> None:
    counts = counted({"a": [3, 3, 3, 5, 5, 1]}, prompt=(6, 6, 2))
    assert order(counts) == [3, 5, 1, 6, 2, 0, 4, 7]
    general = np.array([0, 0, 9, 0, 9, 0, 0, 99])
    assert order(counts, general=general) == [3, 5, 1, 7, 2, 4, 6, 0]
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
    lacking = {"large": [0] * 40 + [1] * 30, "small": [5] * 6}
    assert order(counted(lacking), offered=[0, 1, 2]) == [0, 1, 2]


def test_every_size_is_a_prefix_and_coverage_only_grows() -> None:
    generator = np.random.default_rng(0)
    ids = generator.zipf(1.5, 3000) % 50
    counts = counted({"a": ids[:2000].tolist(), "b": (ids[2000:] * 3 % 50).tolist()}, vocab=50)
    found = row_order(counts, floor=0.95)
    assert sorted(found.token_ids.tolist()) == [*range(50)]
    assert found.ranks[found.token_ids].tolist() == [*range(50)]
    assert set(found.first(9)) < set(found.first(10))
    covered = found.covered(counts.pooled)
    assert (np.diff(covered) >= 0).all()
    assert covered[-1] == counts.pooled.sum()
