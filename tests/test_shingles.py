"""Shingles of texts, their sketches, and templates that many texts share."""

from typing import Any

import pytest
from draftquant.calibration.traces.shingles import (
    SKETCH,
    Overlaps,
    Shingled,
    Sketch,
    Templates,
    shingles,
)
from draftquant.quantize.files.provenance import SeenPrompts
from draftquant.recipes.decode import encode
from draftquant.recipes.strict_json import JsonProblem, decode

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
    sketch = Sketch.parsed("a", Sketch(category="a", values=values[:SKETCH]).text)
    assert sketch.values.tolist() == values[:64].tolist()
    assert sketch.largest_known == int(values[63])
    assert Sketch(category="a", values=shingles(range(40))).largest_known is None
    overlaps = Overlaps([values])  # seven of a sketch of 64 remain beside a template
    assert overlaps.with_sketch(values[:7], largest=int(values[63])).tolist() == [0.0]
    assert overlaps.with_sketch(values[:8], largest=int(values[7])).tolist() == [1.0]
    assert overlaps.with_sketch(values[:7], largest=None).tolist() == [1.0]
    other = shingles([*range(765), *range(5000, 5250)])
    (found,) = Overlaps([other]).with_sketch(sketch.values, largest=sketch.largest_known)
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
        return [len(Templates(given).own(one.values, one.category, 4)) for one in given]

    assert own_of(prompts(3)) == [20, 20, 20]
    without = Shingled(category="a", document="x", values=shingles(range(9000, 9040)))
    assert own_of([*prompts(3), without]) == [20, 20, 20, 25]
    assert own_of(prompts(2)) == [105, 105]
    assert own_of(prompts(9, document="talk")) == [105] * 9
    for category in "ab":
        others = [Sketch(category=category, values=one.values) for one in prompts(3)[1:]]
        known = Templates(prompts(1), others)
        assert len(known.own(prompts(1)[0].values, category, 4)) == 20  # of b: of all


def test_a_prompt_that_is_hardly_more_than_a_template_keeps_all() -> None:
    """Near copies, of which each has another first token."""
    values = [shingles([900 + i, *range(60)]) for i in range(9)]
    copies = [Shingled(category="a", document=str(i), values=v) for i, v in enumerate(values)]
    templates = Templates(copies)
    assert [len(templates.own(one.values, "a", 4)) for one in copies] == [46] * 9
    assert [len(templates.own(one.values, "a", 1)) for one in copies] == [1] * 9


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
            with pytest.raises(JsonProblem, match=rf"{key}\.a: expected 1 to 64 values"):
                decode(SeenPrompts, mapping | {"sketches": sketches | {key: {"a": [bad]}}})
