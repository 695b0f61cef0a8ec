"""Groups of inputs that divide the rows of every linear: which do, where the recipe's do not."""

from collections.abc import Sequence

from ...recipes.schema import Recipe
from ..drafts.family import Row
from ..errors import LayoutError


def check_groups(recipe: Recipe, claimed: Sequence[tuple[Row, int]]) -> None:
    """Fail if a row of a linear that is to be quantized is no whole groups.

    Args:
        recipe: with the rules, and named in the error.
        claimed: every tensor, and the number of the rule that claims it.

    Raises:
        LayoutError: names the linear, and the group sizes that fit all linears of its format.
    """
    rules = [(row.tensor, recipe.rules[index]) for row, index in claimed]
    quantized = [(t, recipe.of(rule).weights) for t, rule in rules if rule.action == "quantize"]
    for tensor, weights in quantized:
        size = weights.group_size
        if weights.granularity != "group" or size is None or tensor.shape[1] % size == 0:
            continue
        rows = [t.shape[1] for t, other in quantized if other == weights]
        known = weights.number.sizes["group"]
        fitting = [s for s in sorted(known, reverse=True) if not any(row % s for row in rows)]
        raise LayoutError(
            tensor.name,
            f"layout {recipe.layout} needs a multiple of {size} inputs, got {tensor.shape[1]}",
            fix=f"groups of {' or '.join(map(str, fitting))} fit every linear: write a recipe with"
            f" 'extends: {recipe.name}' and 'weights: {{group_size: {fitting[0]}}}'"
            if fitting
            else f"no groups of {weights.dtype} fit: keep this tensor, or use a scale per channel",
        )
