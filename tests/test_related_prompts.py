"""Prompts that are related: by their text, by what the target continues, by what is declared."""

from collections.abc import Sequence
from dataclasses import replace

from draftquant.calibration.traces.related_prompts import (
    PromptText,
    alike_groups,
    num_near_duplicates,
    related_groups,
    suggested_clusters,
)

TEMPLATE = tuple(range(900, 1000))


def texts(
    *prompts: Sequence[int], category: str = "a", continuations: Sequence[int] | None = None
) -> list[PromptText]:
    """Each prompt with a continuation of its own, or with the given ones."""
    own = {"category": category, "cluster": None, "declared": None}
    pairs = zip(prompts, continuations or range(len(prompts)), strict=False)
    begin = tuple(category.encode())
    return [PromptText(**own, prompt=tuple(p), continuation=(*begin, last)) for p, last in pairs]


def body(first: int, length: int = 20) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_a_long_common_beginning() -> None:
    """18 of 20 tokens are 90 %; 17 are not."""
    assert num_near_duplicates(texts(body(0), (*body(0, 18), 800, 801), body(100))) == 1
    assert num_near_duplicates(texts(body(0), (*body(0, 17), 800, 801, 802), body(100))) == 0
    assert num_near_duplicates(texts(body(0, 10), body(0, 50), body(100))) == 1  # of the shorter
    group = [(*body(0), last) for last in range(5)]
    assert num_near_duplicates(texts(*group, body(100), (*body(100), 7))) == 5
    own = [TEMPLATE + body(first, 8) for first in (0, 100, 200)]
    assert num_near_duplicates(texts(*own)) == 0
    assert num_near_duplicates(texts(*own, TEMPLATE + body(200, 8)[:-1])) == 1


def test_from_ten_prompts_on_a_task_has_a_template_of_its_own() -> None:
    task = texts(*(TEMPLATE + body(100 * i, 8) for i in range(10)))
    others = texts(body(5000), category="b")
    assert num_near_duplicates([*task, *others]) == 0
    assert num_near_duplicates([*task[1:], *others]) == 8


def test_a_changed_token_anywhere() -> None:
    """43 tokens have 40 shingles, of which a token changes 4: a tenth."""
    for length, known in ((43, 1), (42, 0)):
        whole = body(0, length)
        changed = (*whole[:20], 800, *whole[21:])
        assert num_near_duplicates(texts(whole, changed, body(100), body(200))) == known


def test_what_is_only_claimed_to_belong_together() -> None:
    """A conversation and a cluster group prompts; by their texts, only near duplicates do."""
    given = texts(body(0), body(100), body(200), (*body(0, 19), 800))
    claimed = [replace(one, cluster=name, declared=group) for one, name, group in
               zip(given, "xxyz", (None, "d", "d", None), strict=True)]  # fmt: skip
    assert related_groups(claimed) == [[0, 1, 2, 3]]
    assert alike_groups(claimed) == [[0, 3], [1], [2]]


# ---- groups that ids or categories suggest

SUGGESTING = {
    "documents": [(f"doc{d}-{i}", "all") for d in range(8) for i in range(5)],
    "tasks": [(f"task{t}/{i}", "few-shot") for t in "abc" for i in range(10)],
    "categories": [(f"p{i}", f"user {i // 4}") for i in range(40)],
}
SILENT = {
    "numbers": [(f"q-{i}", "all") for i in range(40)],
    "a category each": [(f"{c}/{i}", c) for c in ("math", "code", "chat") for i in range(10)],
    "two": [(f"{name}-{i}", "all") for name in "ab" for i in range(10)],
    "one of each": [(f"doc{d}-1", "all") for d in range(20)],
    "turns": [(f"{n}/turn-{t}", "all") for n in range(8) for t in (1, 2)],
    "nothing": [],
}


def test_names_that_suggest_groups() -> None:
    for name, prompts in SUGGESTING.items():
        assert suggested_clusters(prompts), name
    for name, prompts in SILENT.items():
        assert suggested_clusters(prompts) == "", name
