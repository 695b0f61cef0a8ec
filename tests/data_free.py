"""Recipes without what must be measured: for tests of formats and files, which are the same."""

import dataclasses

from draftquant.recipes import Recipe, built_in_recipes, load_recipe

DATA_FREE = tuple(n for n in built_in_recipes() if load_recipe(n).algorithm.rounding == "nearest")
"""Shipped recipes whose algorithm looks at no inputs."""
LAYERS_ALONE = tuple(
    name
    for name in DATA_FREE
    if all(
        {"attention", "mlp"} >= {*r.role} for r in load_recipe(name).rules if r.action == "quantize"
    )
    and load_recipe(name).expect.quantized_per_layer == 7
)
"""Those that quantize the layers' linears; `heads.py` has the formats of others."""


def data_free(recipe: Recipe) -> Recipe:
    """The same formats, by the algorithm and the backend that need nothing."""
    algorithm = dataclasses.replace(recipe.algorithm, scale="absmax", rounding="nearest")
    return dataclasses.replace(recipe, backend="torch", algorithm=algorithm)
