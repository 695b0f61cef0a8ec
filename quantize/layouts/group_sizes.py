"""Groups of inputs that divide the rows of every linear: which do, where the recipe's do not."""

from collections.abc import Sequence
from dataclasses import replace

from ...recipes.library import recipe_file
from ...recipes.schema import Recipe, WeightFormat
from ..drafts.family import Row
from ..errors import LayoutError


def check_groups(recipe: Recipe, claimed: Sequence[tuple[Row, int]]) -> None:
    """Fail if a row of a linear that is to be quantized is no whole groups.

    Args:
        recipe: with the rules, and named in the error.
        claimed: every tensor, and the number of the rule that claims it.

    Raises:
        LayoutError: names the linear and the group sizes that fit all linears of its format, with a
            recipe file that has them.
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
        what = f"layout {recipe.layout} needs a multiple of {size} inputs, got {tensor.shape[1]}"
        if not fitting:
            fix = (
                f"no groups of {weights.dtype} fit: take a recipe with a scale per channel, such as"
                " int4-channel-gptq or fp8-ptpc"
            )
            raise LayoutError(tensor.name, what, fix=fix)
        raise LayoutError(
            tensor.name,
            what,
            details=recipe_file(_in_groups(recipe, weights, fitting[0])).splitlines(),
            fix=f"groups of {' or '.join(map(str, fitting))} fit every linear: write these lines"
            " into mine.yaml, and give --recipe mine.yaml",
        )


def _in_groups(recipe: Recipe, weights: WeightFormat, size: int) -> Recipe:
    """The recipe with other groups where it has this format of weights."""
    other = replace(weights, group_size=size)
    own = other if recipe.weights == weights else recipe.weights
    rules = tuple(
        replace(rule, format=replace(rule.format, weights=other))
        if rule.format is not None and rule.format.weights == weights
        else rule
        for rule in recipe.rules
    )
    summary = f"{recipe.name} in groups of {size}"
    return replace(recipe, name="mine", summary=summary, weights=own, rules=rules)
