"""The forms of a draft that are compared: as it is, by each recipe, with other heads besides."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from ...recipes import load_recipe
from ...recipes.expectations import Expectation
from ...recipes.formats import KvCacheDtype, OnlineHead
from ...recipes.schema import Format, Recipe, Rule
from ..drafts.family import Draft
from ..errors import EstimateError, LayoutError, PlanError
from ..quantization_plan import Plan, make_plan
from .draft_round import (
    as_it_is,
    has_plain_head,
    plain_weights,
    planned_weights,
    with_online_head,
    with_vocabulary,
)
from .passes import Weight

ONLINE_HEADS: tuple[OnlineHead, ...] = get_args(OnlineHead)
_FORMATS = dict(zip(ONLINE_HEADS, ("fp8-ptpc", "nvfp4-weights"), strict=True))
"""The recipe whose format a head in a folder has, for the same arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """The draft in one form.

    Attributes:
        draft: whose headers these are; with a cut head where `rows` says so.
        plan: of this draft; None = as it is.
        rows: kept rows of the head; None = all that the draft has.
        head: what its head is quantized to, beside what the plan does; None = nothing.
        kv_cache: the format of its KV cache, by an engine's option; None = as the recipe says,
            which is BF16 where it says nothing.
    """

    draft: Draft
    plan: Plan | None = None
    rows: int | None = None
    head: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None

    @property
    def cache(self) -> KvCacheDtype | None:
        """The format that its KV cache is read in; None = BF16."""
        recipe = None if self.plan is None else self.plan.recipe
        if self.kv_cache is not None or recipe is None or recipe.kv_cache is None:
            return self.kv_cache
        return recipe.kv_cache.dtype

    @property
    def of(self) -> str:
        """The recipe; of the draft as it is, its dtype."""
        return as_it_is(self.draft) if self.plan is None else self.plan.recipe.name

    @property
    def name(self) -> str:
        """With what is said of its head and its cache."""
        rows = () if self.rows is None else (f"{self.rows:,} rows",)
        head = () if self.head is None else (f"{self.head.upper()} head",)
        cache = () if self.kv_cache is None else ("FP8 KV cache",)
        return ", ".join((self.of, *rows, *head, *cache))

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Its tensors as they are read."""
        plain = plain_weights(self.draft) if self.plan is None else planned_weights(self.plan)
        return plain if self.head is None else with_online_head(self.draft, plain, self.head)

    @property
    def stored_bytes(self) -> int:
        """Of all tensors of a folder in this form; a quantized copy of the target's is in none."""
        own = {row.canonical for row in self.draft.rows}
        return sum(weight.nbytes for weight in self.weights if weight.row.canonical in own)

    def without_head(self) -> "Form":
        """The same with its head as it is."""
        return replace(self, head=None)

    def in_folder(self) -> Plan | None:
        """What writes a folder in this form; None where nothing does, or where it is as it is."""
        if self.head is None or not has_plain_head(plain_weights(self.draft)):
            return None if self.head else self.plan
        recipe = _with_head(None if self.plan is None else self.plan.recipe, self.head)
        layers = None if self.plan is None else self.plan.target_layers
        try:
            return make_plan(recipe, self.draft, target_layers=layers)
        except (PlanError, LayoutError):  # the layout has no such head, or no second format
            return None


def plain_forms(draft: Draft, plans: Iterable[Plan]) -> tuple[Form, ...]:
    """The draft as it is, and by each plan.

    Raises:
        EstimateError: two of them have one name.
    """
    forms = (Form(draft=draft), *(Form(draft=draft, plan=plan) for plan in plans))
    names = [form.name for form in forms]
    for name in names:
        if names.count(name) > 1:
            raise EstimateError(
                "--recipe", f"two forms are called {name}", fix="rename one of them"
            )
    return forms


def with_other_heads(
    form: Form, sizes: Sequence[int], heads: Sequence[OnlineHead]
) -> Iterator[Form]:
    """The same form with every head asked for: cut to each size, quantized, and both.

    Raises:
        EstimateError: see `with_vocabulary`.
    """
    plain = not any(w.row.role == "head" for w in form.weights) or has_plain_head(form.weights)
    for size in (None, *sizes):
        cut = form if size is None else _cut(form, size)
        for head in (None, *(heads if plain else ())):
            if size is not None or head is not None:
                yield replace(cut, head=head)


def _cut(form: Form, size: int) -> Form:
    draft = with_vocabulary(form.draft, size)
    plan = None
    if form.plan is not None:
        plan = make_plan(form.plan.recipe, draft, target_layers=form.plan.target_layers)
    return Form(draft=draft, plan=plan, rows=size)


def _with_head(recipe: Recipe | None, head: OnlineHead) -> Recipe:
    """A recipe that quantizes the head besides; of None, the head alone."""
    other = load_recipe(_FORMATS[head])
    form = Format(weights=other.weights, activations=other.activations)
    if recipe is None:
        rules = tuple(
            Rule(role=rule.role, action="keep", why="as it is", optional=True)
            for rule in other.rules
            if "head" not in rule.role
        )
        own = Rule(role=("head",), action="quantize")
        return replace(other, rules=(*rules, own), expect=Expectation(quantized_per_layer=0))
    same = form == Format(weights=recipe.weights, activations=recipe.activations)
    rule = Rule(role=("head",), action="quantize", format=None if same else form)
    others = tuple(rule for rule in recipe.rules if "head" not in rule.role)
    return replace(recipe, rules=(*others, rule))
