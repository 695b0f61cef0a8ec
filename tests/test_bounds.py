"""What a number may be: the same words wherever one is refused."""

import math

import pytest
from draftquant.recipes.decode import ABOVE_0, AT_LEAST_1, CONFIDENCE, SHARE, SHARE_OR_ALL, Bounds
from draftquant.recipes.errors import DraftQuantError


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "expected"),
    [
        (AT_LEAST_1, (1, 10**400), (0, math.inf, math.nan), "expected at least 1, got "),
        (ABOVE_0, (1e-300,), (0, -1.0, math.inf), "expected more than 0, got "),
        (SHARE, (0.5,), (0, 1.0), "expected a share in (0, 1), got "),
        (SHARE_OR_ALL, (1,), (0, 1.1), "expected a share in (0, 1], got "),
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
