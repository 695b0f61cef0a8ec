"""Claims: which rule of a recipe claims which tensor of a draft.

Every tensor is claimed once, and every rule that is not `optional` claims one.
"""

import difflib
import fnmatch
from collections.abc import Sequence

from ..recipes.schema import Recipe, Rule
from .drafts.family import Draft, Row
from .errors import PlanError


def claims(recipe: Recipe, draft: Draft) -> tuple[int, ...]:
    """The index of the rule that claims each row of a draft, in the order of its rows.

    Raises:
        PlanError: a tensor is unclaimed or claimed twice, a rule claims nothing or is to quantize
            what cannot be.
    """
    found = []
    for row in draft.rows:
        index = _claim(recipe, draft, row)
        if recipe.rules[index].action == "quantize":
            _check_quantizable(recipe, draft, row)
        found.append(index)
    _check_rules_used(recipe, draft, frozenset(found))
    return tuple(found)


def _claim(recipe: Recipe, draft: Draft, row: Row) -> int:
    """Index of the rule that claims a tensor: patterns (exceptions) go before roles."""
    by_name = [i for i, rule in enumerate(recipe.rules) if _names(rule, row)]
    by_role = [i for i, rule in enumerate(recipe.rules) if row.role in rule.role]
    for claims in (by_name, by_role):
        if len(claims) > 1:
            raise PlanError(
                f"recipe {recipe.name}",
                f"{row.tensor.name} is claimed by rules[{claims[0]}] and rules[{claims[1]}]",
                fix="narrow one of the two patterns",
            )
    claims = by_name or by_role
    if not claims:
        raise PlanError(
            f"recipe {recipe.name}",
            f"no rule claims {row.tensor.name} (role {row.role}) of {draft.checkpoint.folder}",
            fix=f"add a rule for role {row.role!r}",
        )
    return claims[0]


def _names(rule: Rule, row: Row) -> bool:
    """True if one of the rule's patterns matches the tensor's on-disk or canonical name."""
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for pattern in rule.tensor
        for name in (row.tensor.name, row.canonical)
    )


def _check_quantizable(recipe: Recipe, draft: Draft, row: Row) -> None:
    if row.role not in ("attention", "mlp") or len(row.tensor.shape) != 2:
        raise PlanError(
            f"recipe {recipe.name}",
            f"{row.tensor.name} (role {row.role}, shape {list(row.tensor.shape)}) cannot be"
            f" quantized: engines serve {draft.family.name} with it in floating point",
            fix="quantize roles attention and mlp only",
        )


def _check_rules_used(recipe: Recipe, draft: Draft, used: frozenset[int]) -> None:
    without_fc = not getattr(draft.geometry, "fuses", True)
    for index, rule in enumerate(recipe.rules):
        if index in used or rule.optional or (without_fc and rule.role == ("fusion",)):
            continue
        hint = f"roles here: {sorted({row.role for row in draft.rows})}"
        if rule.tensor:
            hint = f"nearest: {', '.join(_nearest(rule.tensor, draft))}"
        raise PlanError(
            f"recipe {recipe.name}",
            f"rules[{index}] ({rule}) claims no tensor of {draft.checkpoint.folder}"
            f" ({draft.family.name}, {len(draft.rows)} tensors); {hint}",
            fix="correct the rule, mark it 'optional: true', or use the recipe for this family",
        )


def _nearest(patterns: Sequence[str], draft: Draft) -> list[str]:
    """Up to three names, on disk or canonical, that look most like the patterns."""
    names = [name for row in draft.rows for name in (row.tensor.name, row.canonical)]
    unique = list(dict.fromkeys(names))
    wanted = [pattern.replace("*", "") for pattern in patterns]
    near = [n for w in wanted for n in difflib.get_close_matches(w, unique, 3, cutoff=0.0)]
    return near[:3]
