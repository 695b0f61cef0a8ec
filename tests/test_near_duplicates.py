"""Prompts that hardly differ: found by their beginnings and continuations, not by a template."""

from collections.abc import Sequence
from dataclasses import replace

from draftquant.calibration.traces.near_duplicates import (
    PromptText,
    alike_groups,
    independent_groups,
    num_near_duplicates,
    suggested_clusters,
)

TEMPLATE = tuple(range(900, 1000))


def texts(
    *prompts: Sequence[int], category: str = "a", continuations: Sequence[int] | None = None
) -> list[PromptText]:
    """Each prompt with a continuation of its own, or with the given ones."""
    return [
        PromptText(
            category=category,
            prompt=tuple(prompt),
            continuation=(*category.encode(), (continuations or range(len(prompts)))[i]),
        )
        for i, prompt in enumerate(prompts)
    ]


def body(first: int, length: int = 20) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_a_long_common_beginning() -> None:
    """18 of 20 tokens are 90 %; 17 are not."""
    assert num_near_duplicates(texts(body(0), (*body(0, 18), 800, 801), body(100))) == 1
    assert num_near_duplicates(texts(body(0), (*body(0, 17), 800, 801, 802), body(100))) == 0


def test_of_the_shorter_of_the_two() -> None:
    """A prompt that goes on where another ends."""
    assert num_near_duplicates(texts(body(0, 10), body(0, 50), body(100))) == 1


def test_each_group_counts_its_prompts_beyond_the_first() -> None:
    group = [(*body(0), last) for last in range(5)]
    assert num_near_duplicates(texts(*group, body(100), (*body(100), 7))) == 5


def test_a_template_makes_no_near_duplicates() -> None:
    prompts = [TEMPLATE + body(first, 8) for first in (0, 100, 200)]
    assert num_near_duplicates(texts(*prompts)) == 0
    assert num_near_duplicates(texts(*prompts, TEMPLATE + body(200, 8)[:-1])) == 1


def test_a_category_of_ten_has_a_template_of_its_own() -> None:
    """The examples of a task: long against what follows, and another task has others."""
    task = tuple(range(500, 700))
    first = [TEMPLATE + body(first, 8) for first in range(0, 200, 20)]
    second = [task + body(first, 8) for first in range(0, 200, 20)]
    assert num_near_duplicates(texts(*first) + texts(*second, category="b")) == 0
    assert num_near_duplicates(texts(*first, *second)) == 18
    nine = texts(*first) + texts(*second[1:], category="b")
    assert num_near_duplicates(nine) == 8


def test_the_same_continuation_of_different_prompts() -> None:
    """Whatever the categories; a prompt alike in both ways counts once."""
    assert num_near_duplicates(texts(body(0), body(100), body(50), continuations=[1, 2, 1])) == 1
    alike = texts(body(0), (*body(0, 19), 800), body(50), continuations=[1, 1, 2])
    assert num_near_duplicates(alike) == 1


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
    assert independent_groups(claimed) == [[0, 1, 2, 3]]
    assert alike_groups(claimed) == [[0, 3], [1], [2]]


def test_copies_are_not_near_duplicates() -> None:
    assert num_near_duplicates(texts(body(0), body(0), body(100), continuations=[1, 1, 2])) == 0
    assert num_near_duplicates([]) == 0
    assert num_near_duplicates(texts(body(0))) == 0
    assert num_near_duplicates(texts(TEMPLATE, TEMPLATE + body(0), TEMPLATE + body(50))) == 0


# ---- groups that ids or categories suggest

SUGGESTING = {
    "documents": ([(f"doc{d}-{i}", "all") for d in range(8) for i in range(5)], "8 groups (doc0, "),
    "tasks": ([(f"task{t}/{i}", "few-shot") for t in "abc" for i in range(10)], "3 groups (taska"),
    "categories": ([(f"p{i}", f"user {i // 4}") for i in range(40)], "10 groups (user 0, user 1"),
}
SILENT = {
    "numbers": [(f"q-{i}", "all") for i in range(40)],
    "a category each": [(f"{c}/{i}", c) for c in ("math", "code", "chat") for i in range(10)],
    "a name each": [(f"n{i}-x", "all") for i in range(40)],
    "two": [(f"{name}-{i}", "all") for name in "ab" for i in range(10)],
    "one of each": [(f"doc{d}-1", "all") for d in range(20)],
    "turns": [(f"{n}/turn-{t}", "all") for n in range(8) for t in (1, 2)],
    "levels": [(f"p{i}", f"level {i % 2}") for i in range(40)],
    "nothing": [],
}


def test_names_that_suggest_groups() -> None:
    for prompts, expected in SUGGESTING.values():
        assert expected in suggested_clusters(prompts)
        assert 'declare it as "cluster"' in suggested_clusters(prompts)


def test_names_that_suggest_nothing() -> None:
    for name, prompts in SILENT.items():
        assert suggested_clusters(prompts) == "", name
