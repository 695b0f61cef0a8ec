"""Prompts that hardly differ: found by shingles of what they begin with and of what follows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftquant.calibration.traces.near_duplicates import (
    Overlaps,
    PromptText,
    Shingled,
    Templates,
    alike_groups,
    independent_groups,
    largest_known,
    num_near_duplicates,
    parsed_sketch,
    shingles,
    sketch_text,
    suggested_clusters,
)
from draftquant.quantize.files.provenance import SeenPrompts
from draftquant.recipes.decode import encode
from draftquant.recipes.strict_json import JsonProblem, decode

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
    assert num_near_duplicates(texts(body(0, 10), body(0, 50), body(100))) == 1  # of the shorter
    group = [(*body(0), last) for last in range(5)]
    assert num_near_duplicates(texts(*group, body(100), (*body(100), 7))) == 5
    own = [TEMPLATE + body(first, 8) for first in (0, 100, 200)]
    assert num_near_duplicates(texts(*own)) == 0
    assert num_near_duplicates(texts(*own, TEMPLATE + body(200, 8)[:-1])) == 1


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


# ---- groups that ids or categories suggest

SUGGESTING = {
    "documents": ([(f"doc{d}-{i}", "all") for d in range(8) for i in range(5)], "8 groups (doc0, "),
    "tasks": ([(f"task{t}/{i}", "few-shot") for t in "abc" for i in range(10)], "3 groups (taska"),
    "categories": ([(f"p{i}", f"user {i // 4}") for i in range(40)], "10 groups (user 0, user 1"),
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
    for prompts, expected in SUGGESTING.values():
        assert expected in suggested_clusters(prompts)
        assert 'declare it as "cluster"' in suggested_clusters(prompts)
    for name, prompts in SILENT.items():
        assert suggested_clusters(prompts) == "", name


# ---- shingles and sketches

WHOLE = 2**64


def by_hand(tokens: list[int]) -> int:
    """One shingle as the module describes it, in whole numbers of Python."""
    h = 0
    for token in tokens:
        h = (h * 0x9E3779B97F4A7C15 + token + 1) % WHOLE
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % WHOLE
    h = (h ^ h >> 27) * 0x94D049BB133111EB % WHOLE
    return (h ^ h >> 31) >> 32


def test_the_hash_is_fixed() -> None:
    """Records keep it: another hash needs another `Sketches.method`."""
    tokens = [5, 0, 151_643, *range(100, 117)]
    assert shingles(tokens).tolist() == sorted(by_hand(tokens[i : i + 16]) for i in range(5))
    assert shingles(tokens, 4).tolist() == sorted(by_hand(tokens[i : i + 4]) for i in range(17))
    assert shingles(tokens[:15], 4).tolist() == [by_hand(tokens[:15])]
    assert shingles([1, 2, 3]).tolist() == [by_hand([1, 2, 3])] == [565070331]


def test_a_sketch_is_the_64_smallest_and_estimates_an_overlap() -> None:
    """1,000 shingles, of which three quarters are in the other prompt: a sample of 64 shows it."""
    values = shingles(range(1015))
    sketch = parsed_sketch(sketch_text(values))
    assert sketch.tolist() == values[:64].tolist()
    assert largest_known(sketch) == int(values[63])
    assert largest_known(shingles(range(40))) is None
    overlaps = Overlaps([values])  # seven of a sketch of 64 remain beside a template
    assert overlaps.with_sketch(values[:7], largest=int(values[63])).tolist() == [0.0]
    assert overlaps.with_sketch(values[:8], largest=int(values[63])).tolist() == [1.0]
    assert overlaps.with_sketch(values[:7], largest=None).tolist() == [1.0]
    other = shingles([*range(765), *range(5000, 5250)])
    (found,) = Overlaps([other]).with_sketch(sketch, largest=largest_known(sketch))
    assert found == pytest.approx(0.75, abs=0.15)


def test_most_of_three_documents_make_a_template() -> None:
    """85 shingles are the template's; turns of one conversation have none, sketches count too."""

    def prompts(count: int, document: str = "") -> list[Shingled]:
        return [
            Shingled(category="a", document=document or str(number), values=shingles(
                [*range(100), *range(1000 * number + 1000, 1000 * number + 1020)]))
            for number in range(count)
        ]  # fmt: skip

    def own_of(given: list[Shingled]) -> list[int]:
        return [len(Templates(given).own(one.values, one.category)) for one in given]

    assert own_of(prompts(3)) == [20, 20, 20]
    without = Shingled(category="a", document="x", values=shingles(range(9000, 9040)))
    assert own_of([*prompts(3), without]) == [20, 20, 20, 25]
    assert own_of(prompts(2)) == [105, 105]
    assert own_of(prompts(9, document="talk")) == [105] * 9
    others = [np.unique(one.values) for one in prompts(3)[1:]]
    for category in "ab":
        known = Templates(prompts(1), {category: others})
        assert len(known.own(prompts(1)[0].values, category)) == 20  # of b: of all


def test_a_prompt_that_is_hardly_more_than_a_template_keeps_all() -> None:
    """Near copies, of which each has another first token."""
    copies = [
        Shingled(category="a", document=str(i), values=shingles([900 + i, *range(60)]))
        for i in range(9)
    ]
    templates = Templates(copies)
    assert [len(templates.own(one.values, "a")) for one in copies] == [46] * 9
    assert [len(templates.own(one.values, "a", sample=True)) for one in copies] == [1] * 9


def test_what_is_no_sketch_is_refused() -> None:
    sketches: dict[str, Any] = {
        "method": "64 minima of 4-token shingles, of 16-token ones of continuations, 2",
        "minima": {"a": ["01234567"]},
        "continuations": {"a": ["01234567"]},
    }
    mapping = {"sha256": ["a" * 64], "sketches": sketches}
    assert encode(decode(SeenPrompts, mapping)) == mapping
    for key in sketches.keys() - {"method"}:
        for bad in ("", "1234567", "0123456G", "0" * 8 * 65):
            damaged = mapping | {"sketches": sketches | {key: {"a": [bad]}}}
            with pytest.raises(JsonProblem, match=rf"{key}\.a: expected 1 to 64 values"):
                decode(SeenPrompts, damaged)
