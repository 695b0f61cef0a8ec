"""What a number may be: the same words wherever one is refused."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from draftquant.recipes.decode import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    CONFIDENCE,
    HEX_64,
    SHARE,
    Bounds,
    problem_of,
)
from draftquant.recipes.errors import DraftQuantError
from draftquant.recipes.strict_json import JsonProblem, decode


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "expected"),
    [
        (AT_LEAST_1, (1, 10**400), (0, math.inf, math.nan), "expected at least 1, got "),
        (ABOVE_0, (1e-300,), (0, -1.0, math.inf), "expected more than 0, got "),
        (SHARE, (0.5,), (0, 1.0), "expected a share in (0, 1), got "),
        (CONFIDENCE, (0.95,), (0.5, 1), "expected a share in (0.5, 1), got "),
    ],
)
def test_numbers_are_refused_in_one_way(
    bounds: Bounds, inside: tuple[float, ...], outside: tuple[float, ...], expected: str
) -> None:
    for value in (*inside, None):
        bounds.check(DraftQuantError, "--number", value, fix="another")
    for value in outside:
        with pytest.raises(DraftQuantError) as got:
            bounds.check(DraftQuantError, "--number", value, fix="another")
        assert got.value.what == f"{expected}{value}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    k: Annotated[int | None, Bounds(least=1, most=1024)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded:
    count: Annotated[int, AT_LEAST_1]
    digest: Annotated[str, HEX_64] = "a" * 64
    tokens: tuple[Annotated[int, AT_LEAST_0], ...] = ()
    shares: Mapping[str, Annotated[float, SHARE]] = dataclasses.field(default_factory=dict)
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"count": 0}, "count: expected at least 1, got 0"),
        ({"count": 1, "tokens": [3, -2]}, "tokens[1]: expected at least 0, got -2"),
        ({"count": 1, "shares": {"a": 2.5}}, "shares.a: expected a share in (0, 1), got 2.5"),
        ({"count": 1, "inner": {"k": 2000}}, "inner.k: expected 1 to 1,024, got 2000"),
    ],
)
def test_a_record_is_held_to_the_rules_at_its_fields(given: Any, problem: str) -> None:
    """By whoever reads it, and asked of one that was made otherwise."""
    with pytest.raises(JsonProblem) as got:
        decode(Bounded, given)
    assert str(got.value) == problem
    tokens, inner = tuple(given.get("tokens", ())), given.get("inner")
    made = Bounded(**given | {"tokens": tokens, "inner": inner and Inner(**inner)})
    assert problem_of(made) == problem
    assert problem_of(Bounded(count=1, tokens=(0,), shares={"a": 0.5}, inner=Inner(k=3))) is None
