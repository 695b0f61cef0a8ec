"""Categories and context bins in the sentences of a verdict."""

from collections.abc import Sequence

from .advice import lines
from .categories import CategoryFigures


def findings(found: Sequence[CategoryFigures]) -> str:
    """Each with its change and bounds."""
    return "; ".join(map(_finding, found))


def _finding(found: CategoryFigures) -> str:
    assert found.change is not None  # it has an outcome, or would have
    lower, upper = found.change.relative_bounds
    return (
        f"{found.category!r} ({found.num_prompts} prompts) changed by"
        f" {found.change.relative_change:+.2%}, bounds {lower:+.2%} and {upper:+.2%}"
    )


def number_of(found: Sequence[CategoryFigures]) -> str:
    """A category, 2 categories, a category and 2 context bins."""
    of_bins = sum(one.is_context_bin for one in found)
    counted = (
        (len(found) - of_bins, "a category", "categories"),
        (of_bins, "a context bin", "context bins"),
    )
    return " and ".join(
        one if number == 1 else f"{number} {several}" for number, one, several in counted if number
    )


def kinds_of(found: Sequence[CategoryFigures]) -> str:
    """The category, the context bin, or "category and context bin"."""
    kinds = {one.is_context_bin: "context bin" if one.is_context_bin else "category"
             for one in found}  # fmt: skip
    return " and ".join(kinds[kind] for kind in sorted(kinds))


def names(found: Sequence[CategoryFigures]) -> str:
    """As they are in the report."""
    return ", ".join(repr(one.category) for one in found)


def calibrate_on(found: Sequence[CategoryFigures]) -> str:
    """Ways to lose less in these parts, one a line."""
    bins = [one for one in found if one.is_context_bin]
    others = [one for one in found if not one.is_context_bin]
    ways = []
    if others:
        ways.append(f"Calibrate on other prompts of {names(others)} too.")
    if bins:
        ways.append(f"Calibrate on other prompts of these lengths too: {names(bins)}.")
    return lines(*ways)
