"""Claims: which rule of a recipe claims which tensor of a draft, and whether it may."""

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ...recipes.errors import PlanError
from ...recipes.schema import LAYER_ROLES, QUANTIZABLE, SHARED_ROLES, Recipe, Role, Rule
from ..drafts.family import Draft, Row, norms_before
from ..drafts.shared.mixture import is_expert
from ..stored.stored_tables import EMBEDDING, HEAD

NormAction = Literal["transform", "learn"]
"""What happens to a kept norm that changes: an exact division by a power of two, or learning."""


def claims(recipe: Recipe, draft: Draft) -> tuple[int, ...]:
    """The index of the rule that claims each row of a draft, in the order of its rows."""
    claimed = []
    for row in draft.rows:
        if row.given == "" and len(row.tensor.shape) == 2:
            folder, shape = draft.checkpoint.folder, list(row.tensor.shape)
            raise PlanError(
                folder,
                f"{row.tensor.name} {shape}: no family reads this draft, and no rule for names"
                " gives this matrix a role",
                fix=f"say what it is: --role '{row.tensor.name}=ROLE' (attention or mlp, which"
                " recipes quantize, fusion, ..., or other, which is kept)",
            )
        index = _claim(recipe, draft, row)
        for what, fix in _problems(recipe, recipe.rules[index], draft, row):
            raise PlanError(f"recipe {recipe.name}", what, fix=fix)
        claimed.append(index)
    _check_rules_used(recipe, draft, frozenset(claimed))
    return tuple(claimed)


def changed_norms(recipe: Recipe, draft: Draft, claimed: Sequence[int]) -> dict[str, NormAction]:
    """What happens to the norms that change, by canonical name.

    The norm before the concat input is transformed if the linears after it are quantized; norms
    learn where the recipe says so, including that one.
    """
    chosen = zip(draft.rows, claimed, strict=True)
    rows = (row for row, index in chosen if recipe.rules[index].action == "quantize")
    quantized = {row.canonical: row.module for row in rows}
    concat, actions = draft.family.concat(draft.geometry), dict[str, NormAction]()
    balances = recipe.algorithm.balance_concat == "auto"
    if balances and concat is not None and not set(concat.linears) - quantized.keys():
        actions[concat.norm] = "transform"
    if recipe.algorithm.norms == "learned":
        learned = norms_before(draft, frozenset(quantized.values()))
        actions |= dict.fromkeys((row.canonical for row in learned), "learn")
    return actions


def _claim(recipe: Recipe, draft: Draft, row: Row) -> int:
    """Index of the rule that claims a tensor: patterns (exceptions) take precedence over roles."""
    by_name = [i for i, rule in enumerate(recipe.rules) if names_row(rule, row)]
    named = any(row.role in rule.role for rule in recipe.rules)
    role = row.role if named else _UNNAMED.get(row.role, row.role)
    by_role = [i for i, rule in enumerate(recipe.rules) if role in rule.role]
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


_UNNAMED: Mapping[Role, Role] = {
    "router": "norm", "indexer": "norm", "other": "norm", "correction": "proposal",
}  # fmt: skip
"""Role -> the one whose rule claims it where no rule names its own."""


def names_row(rule: Rule, row: Row) -> bool:
    """True if one of the rule's patterns matches the tensor's on-disk or canonical name."""
    names = (row.tensor.name, row.canonical)
    return any(fnmatch.fnmatchcase(name, p) for p in rule.tensor for name in names)


_NEVER_CODES: Mapping[Role, str] = {
    "router": "if the router were rounded, it would choose other experts",
    "kv_up": "engines multiply by it outside its linear and want floats",
    "embedding": "its rows are looked up, never multiplied; 'action: drop' leaves it to the target",
}
"""Why a matrix is not a linear that an engine multiplies by codes."""


Problems = Iterator[tuple[str, str]]
"""What cannot be done, and the fix."""


def _problems(recipe: Recipe, rule: Rule, draft: Draft, row: Row) -> Problems:
    """Why a rule may not do to a tensor what it says."""
    if rule.action == "quantize":
        yield from _quantized_problems(recipe, rule, draft, row)
    if rule.action != "drop":
        return
    if row.role not in SHARED_ROLES:
        yield (
            f"{row.tensor.name} (role {row.role}) cannot be dropped: engines take only the"
            " embedding and the head of a draft from its target",
            "keep it",
        )
    if row.role not in draft.family.shared_tables or row.canonical not in (EMBEDDING, HEAD):
        yield (
            f"{row.tensor.name} cannot be dropped: engines do not take this table of a"
            f" {draft.family.name} draft from the target",
            "keep it",
        )
    geometry = draft.geometry
    if row.role == "head" and geometry.draft_vocab_size != geometry.vocab_size:
        rows, whole = geometry.draft_vocab_size, geometry.vocab_size
        yield (
            f"{row.tensor.name} cannot be dropped: it has {rows:,} of {whole:,} rows, and engines"
            " cannot take some rows of the target's head",
            "keep the pruned head; it may be quantized",
        )


def _quantized_problems(recipe: Recipe, rule: Rule, draft: Draft, row: Row) -> Problems:
    """Problems of a quantized tensor; fc and the head are outside the layers of algorithms."""
    if row.role not in QUANTIZABLE or len(row.tensor.shape) != 2:
        reason = _NEVER_CODES.get(row.role, "it is not a linear")
        shape, roles = list(row.tensor.shape), ", ".join(QUANTIZABLE)
        yield (
            f"{row.tensor.name} (role {row.role}, shape {shape}) cannot be quantized: {reason}",
            f"quantize roles {roles} only",
        )
    if row.role == "head" and is_tied(draft):
        yield (
            f"{row.tensor.name} cannot be quantized, because config.json ties it to the embedding"
            " (tie_word_embeddings) and engines use the embedding in its place",
            "keep the head, or train the draft with one of its own",
        )
    rounding = recipe.of(rule).algorithm.rounding
    if row.role == "indexer" and rounding != "nearest":
        yield (
            f"{row.tensor.name}: rounding {rounding} needs to know what it reads, and replay ends"
            " where an indexer begins to choose",
            "give it a format of eight bits, round it to nearest, or keep it",
        )
    if is_expert(row.canonical) and rounding == "learned":
        yield (
            f"{row.tensor.name}: rounding learned would keep the weights, gradients and optimizer"
            " states of all experts in memory at once, and an expert that no token reaches would"
            " learn nothing",
            "use 'rounding: gptq' or 'nearest', or give the experts a format of eight bits",
        )
    if row.role not in LAYER_ROLES and recipe.algorithm.rounding == "learned":
        yield (
            f"{row.tensor.name}: rounding learned compares drafts between fc and the head, so it"
            " cannot learn fc or the head themselves",
            "keep fc and the head, or use 'rounding: nearest' or 'gptq'",
        )


def is_tied(draft: Draft) -> bool:
    """True if config.json says that the head is the embedding."""
    return draft.checkpoint.config.get("tie_word_embeddings") is True


_OF_MOST: tuple[tuple[Role, ...], ...] = (("fusion",), ("norm",))
"""Rules that recipes have for every draft, though some families have no such tensor."""


def _check_rules_used(recipe: Recipe, draft: Draft, used: frozenset[int]) -> None:
    specs = draft.family.tensor_specs(draft.geometry)
    sure = {spec.role for spec in specs.values() if not spec.optional}
    for index, rule in enumerate(recipe.rules):
        absent = rule.role in _OF_MOST and sure.isdisjoint(rule.role)
        if index in used or rule.optional or absent:
            continue
        hint = f"roles here: {sorted({row.role for row in draft.rows})}"
        if rule.role == ("head",) and rule.action != "keep":
            hint = "without an lm_head of its own the draft has the target's"
        if rule.tensor:
            hint = f"nearest: {', '.join(_nearest(rule.tensor, draft))}"
        raise PlanError(
            f"recipe {recipe.name}",
            f"rules[{index}] ({rule}) claims no tensor of {draft.checkpoint.folder}"
            f" ({draft.family.name}, {len(draft.rows)} tensors); {hint}",
            fix="correct the rule, mark it 'optional: true', or use the recipe for this family",
        )


def _nearest(patterns: Sequence[str], draft: Draft) -> list[str]:
    names = [name for row in draft.rows for name in (row.tensor.name, row.canonical)]
    unique = list(dict.fromkeys(names))
    wanted = [pattern.replace("*", "") for pattern in patterns]
    near = [n for w in wanted for n in difflib.get_close_matches(w, unique, 3, cutoff=0.0)]
    return near[:3]
