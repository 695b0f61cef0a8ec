"""A mixture: every unit of a draft in a format of its own, and the recipe that says so."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...quantize.errors import LayoutError
from ...quantize.layouts import check_layout
from ...quantize.quantization_plan import Plan, Step
from ...recipes.expectations import Expectation
from ...recipes.roles import LAYER_ROLES
from ...recipes.schema import Format, LayoutName, Recipe, Rule
from ..errors import TuneError

KEPT = "kept"
"""Name of the option that leaves a unit as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Linears that only change together: engines fuse them, and number layers their own way.

    Attributes:
        leaves: last parts of their names, for example q_proj, k_proj and v_proj of every layer.
    """

    leaves: tuple[str, ...]

    def __str__(self) -> str:
        return "+".join(self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a unit may become.

    Attributes:
        name: of the recipe that the format is of, or `KEPT`.
        format: None leaves it as it is.
    """

    name: str
    format: Format | None

    def __str__(self) -> str:
        return self.name


Mixture = Mapping[Unit, Option]
"""Every unit with what it becomes, in the order in which the draft runs them."""


def units_of(plan: Plan) -> tuple[Unit, ...]:
    """The units that a plan quantizes, in the order in which the draft runs them."""
    stages = (tuple(map(_leaf, stage)) for stage in plan.stages()[1:])
    return tuple(Unit(leaves=leaves) for leaves in dict.fromkeys(stages))


def is_kept_whole(mixture: Mixture) -> bool:
    """True if it quantizes nothing."""
    return all(option.format is None for option in mixture.values())


def described(mixture: Mixture) -> str:
    """In one line: the options with their units, those of most linears first."""
    by_option: dict[str, list[Unit]] = {}
    for unit, option in mixture.items():
        by_option.setdefault(option.name, []).append(unit)
    if len(by_option) == 1:
        return f"all {next(iter(by_option))}"
    by_size = sorted(by_option.items(), key=lambda item: -sum(len(u.leaves) for u in item[1]))
    return "; ".join(f"{name}: {', '.join(map(str, units))}" for name, units in by_size)


def recipe_of(base: Recipe, mixture: Mixture, name: str) -> Recipe:
    """The recipe that makes of a draft what a mixture says.

    The format that most linears have is the recipe's own (where the algorithm is not for all, of
    those that it is for: GPTQ rounds no FP8); every other unit has a rule that names its tensors.

    Args:
        base: layout, algorithm, rules for all that is no attention or MLP linear, and policy.
        mixture: of the units that `base` quantizes; not all of them kept.
        name: of the recipe.

    Raises:
        TuneError: `base` has rules for single linears itself, or for more than layers.
    """
    if any(rule.tensor for rule in base.rules):
        raise TuneError(
            f"recipe {base.name}",
            "has rules for single tensors, which would conflict with the rules that tune finds",
            fix="start from a recipe whose rules name roles",
        )
    changed = (r for rule in base.rules if rule.action != "keep" for r in rule.role)
    if beyond := [role for role in changed if role not in LAYER_ROLES]:
        raise TuneError(
            f"recipe {base.name}",
            f"does not keep the {beyond[0]}: units are linears of layers, and candidates are"
            " compared under one head",
            fix=f"start from a recipe that keeps the {beyond[0]}, and quantize it afterwards",
        )
    counts = Counter[Format]()
    for unit, option in mixture.items():
        if option.format is not None:
            counts[option.format] += len(unit.leaves)
    calibrated = [form for form in counts if base.algorithm.of(form.weights) == base.algorithm]
    main = max(calibrated or counts, key=lambda form: counts[form])
    others = [_rule(u, o.format) for u, o in mixture.items() if o.format != main]
    roles = (
        dataclasses.replace(rule, optional=True) if rule.action == "quantize" else rule
        for rule in base.rules
    )
    return dataclasses.replace(
        base,
        name=name,
        summary=described(mixture),
        loads_on=(),
        weights=main.weights,
        activations=main.activations,
        algorithm=base.algorithm.of(main.weights),
        rules=(*others, *roles),
        expect=Expectation(quantized_per_layer=counts.total()),
    )


def _rule(unit: Unit, form: Format | None) -> Rule:
    patterns = tuple(f"*.{leaf}.weight" for leaf in unit.leaves)
    if form is None:
        return Rule(tensor=patterns, action="keep", why="tuned: narrower costs too many tokens")
    return Rule(tensor=patterns, action="quantize", format=form)


def _leaf(step: Step) -> str:
    return step.row.canonical.removesuffix(".weight").rpartition(".")[2]


def mixable_recipes(
    recipes: Sequence[Recipe], layout: LayoutName, *, all_of_them: bool
) -> list[Recipe]:
    """Recipes in one layout, or those of them that it holds.

    Args:
        recipes: by one algorithm and our own backend.
        layout: that all formats are stored in.
        all_of_them: what it does not hold is an error; else it, and AWQ, is left out.

    Raises:
        LayoutError: the layout does not hold one, or holds none.
    """
    found, last = [], None
    for recipe in recipes:
        if not all_of_them and recipe.weights.scale_dtype:
            continue  # AWQ's own scales: another recipe has the same codes
        moved = dataclasses.replace(recipe, layout=layout)
        try:
            check_layout(moved)
        except LayoutError as exc:
            if all_of_them:
                raise
            last = exc
            continue
        found.append(moved)
    if last is not None and not found:
        raise last
    return found


def options_of(recipes: Sequence[Recipe]) -> tuple[Option, ...]:
    """One option for each format of some recipes, by the first that has it, and `KEPT`."""
    formats: dict[Format, str] = {}
    for recipe in recipes:
        form = Format(weights=recipe.weights, activations=recipe.activations)
        formats.setdefault(form, recipe.name)
    found = [Option(name=name, format=form) for form, name in formats.items()]
    return (*found, Option(name=KEPT, format=None))
