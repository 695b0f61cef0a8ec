"""The plan: a recipe applied to a draft's headers, one row per tensor. Pure: it reads no data."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...recipes.decode import encode
from ...recipes.errors import PlanError
from ...recipes.schema import LAYER_ROLES, Format, Recipe
from ..drafts import runtime_names
from ..drafts.draft_cache import CacheScales
from ..drafts.engine_traits import fused_names
from ..drafts.family import Draft, Row
from ..drafts.shared.mixture import without_expert
from ..files.provenance import NO_PROMPTS, SeenPrompts
from ..files.safetensors_header import DTYPE_BYTES, StoredTensor
from ..layouts import check_head, check_layout, get_layout, named_heads
from ..layouts.layout import check_groups, last_part
from ..stored.layouts.scheme import OwnFormat
from .claims import NormAction, Problems, changed_norms, claims
from .outputs import Output, OutputTensors, bytes_of, cache_outputs

if TYPE_CHECKING:
    from ..algorithms import FoundCodes, Statistics

StepAction = Literal["quantize", "keep", "drop"] | NormAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Output):
    """What happens to one tensor, and which rule said so.

    Attributes:
        action: "transform": the norm before the concat input, divided by the power of two that
            balances the halves, exactly; "learn": a norm whose weight learns with the codes.
    """

    action: StepAction
    rule: int

    @property
    def bytes_before(self) -> int:
        """Bytes of the source tensor."""
        return self.row.tensor.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All steps, sorted by tensor name; the `row` of a cache scale is the tensor beside it."""

    recipe: Recipe
    draft: Draft
    steps: tuple[Step, ...]
    target_layers: int | None
    cache: tuple[OutputTensors, ...]

    @property
    def quantized(self) -> tuple[Step, ...]:
        """The steps that quantize."""
        return tuple(step for step in self.steps if step.action == "quantize")

    @property
    def dropped(self) -> tuple[Step, ...]:
        """The steps that leave a table to the target."""
        return tuple(step for step in self.steps if step.action == "drop")

    @property
    def remaining(self) -> Draft:
        """The draft without the dropped tables: what the output stands for."""
        rows = tuple(step.row for step in self.steps if step.action != "drop")
        return dataclasses.replace(self.draft, rows=rows)

    @property
    def balanced(self) -> tuple[Step, tuple[Step, ...]] | None:
        """The norm to be transformed and the linears after it; None where nothing is balanced."""
        concat = self.draft.family.concat(self.draft.geometry)
        if concat is None or self.recipe.algorithm.balance_concat == "off":
            return None
        behind = tuple(s for s in self.quantized if s.row.canonical in concat.linears)
        norms = [step for step in self.steps if step.row.canonical == concat.norm]
        return (norms[0], behind) if norms and len(behind) == len(concat.linears) else None

    @property
    def learned_norms(self) -> tuple[Step, ...]:
        """The norms whose weights learn."""
        return tuple(step for step in self.steps if step.action == "learn")

    def stages(self) -> tuple[tuple[Step, ...], ...]:
        """Unquantized tensors, then linears in the order of the draft, fused ones together."""
        specs = self.draft.family.tensor_specs(self.draft.geometry)
        order = {name: i for i, name in enumerate(specs)}
        groups = {module: group for group in self.draft.fused_groups() for module in group}
        stages: dict[tuple[str, ...], list[Step]] = {}
        for step in sorted(self.quantized, key=lambda s: order[s.row.canonical]):
            module = step.row.module
            stages.setdefault(groups.get(module, (module,)), []).append(step)
        rest = tuple(step for step in self.steps if step.action != "quantize")
        return (rest, *(tuple(stage) for stage in stages.values()))

    @property
    def bytes_before(self) -> int:
        """Tensor bytes of the source, headers not counted."""
        return sum(step.bytes_before for step in self.steps)

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the output, headers not counted."""
        return bytes_of(self.outputs)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Everything that is stored."""
        return (*self.steps, *self.cache)

    def overhead(self) -> dict[str, int]:
        """Bytes that scales, zero points and shapes add, by the last part of their names."""
        scales = [tensor for step in self.quantized for tensor in step.stored[1:]]
        added: Counter[str] = Counter()
        for tensor in (*scales, *(tensor for output in self.cache for tensor in output.stored)):
            added[tensor.name.rpartition(".")[2]] += tensor.nbytes
        return dict(added)

    def recipe_of(self, step: Step) -> Recipe:
        """The recipe as it holds for a tensor: with the format and algorithm of its rule."""
        return self.recipe.of(self.recipe.rules[step.rule])

    def format_of(self, step: Step) -> Format:
        """The format of a quantized tensor."""
        (form,) = self.recipe_of(step).formats
        return form

    def own_formats(self) -> tuple[OwnFormat, ...]:
        """The linears whose format is not the recipe's own, under the names that engines use.

        Includes a head in the recipe's own format where engines find a head only by its name.
        """
        first = self.recipe.formats[0]
        rows = [step.row for step in self.quantized if self.format_of(step) == first]
        formats = list(named_heads(self.recipe.in_format(first), rows))
        for form in self.recipe.formats[1:]:
            steps = [step for step in self.quantized if self.format_of(step) == form]
            names = {name for s in steps for name in (s.row.module, *fused_names(s.row.module))}
            if names:
                leaves = tuple(sorted({last_part(name) for name in names}))
                formats.append(OwnFormat(self.recipe.in_format(form).stored, leaves))
        return tuple(formats)

    def declared(self) -> dict[str, Any]:
        """The `quantization_config` of the output."""
        main, layout = self.recipe.in_format(self.recipe.formats[0]), get_layout(self.recipe.layout)
        return layout.declare(main.stored, self.kept_modules(), self.own_formats())

    def kept_modules(self) -> tuple[str, ...]:
        """Names of the 2-D modules that stay floating-point, for the exclude list."""
        exact = get_layout(self.recipe.layout).exact_excludes
        sides = self.kept_matrices(), [step.row for step in self.quantized]
        return runtime_names.excluded_modules(
            self.draft, *sides, whole_names=exact, target_layers=self.target_layers
        )

    def kept_matrices(self) -> list[Row]:
        """The 2-D tensors that stay floating-point."""
        kept = [step.row for step in self.steps if step.action not in ("quantize", "drop")]
        return [row for row in kept if len(row.tensor.shape) == 2]

    def to_mapping(self) -> dict[str, Any]:
        """The plan as plain data, for `--json`."""
        return {
            "recipe": self.recipe.name,
            "draft": str(self.draft.checkpoint.folder),
            "family": self.draft.family.name,
            "layout": self.recipe.layout,
            "backend": self.recipe.backend,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "overhead_bytes": self.overhead(),
            "kv_cache": encode(self.recipe.kv_cache),
            "tensors": [self._step_mapping(step) for step in self.steps],
        }

    def _step_mapping(self, step: Step) -> dict[str, Any]:
        tensor = step.row.tensor
        return {
            "name": tensor.name,
            "role": step.row.role,
            **({} if step.row.given_by is None else {"given_by": step.row.given_by}),
            "rule": step.rule,
            "action": step.action,
            "why": self.recipe.rules[step.rule].why,
            "format": encode(self.format_of(step)) if step.action == "quantize" else None,
            "dtype": tensor.dtype,
            "bits": 8 * DTYPE_BYTES[tensor.dtype],
            "shape": list(tensor.shape),
            "bytes_before": step.bytes_before,
            "bytes_after": step.bytes_after,
            "stored": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
                for t in step.stored
            ],
        }


def make_plan(recipe: Recipe, draft: Draft, *, target_layers: int | None = None) -> Plan:
    """Apply a recipe to a draft; excludes of kept linears by whole name need the target's layers.

    Raises PlanError, LayoutError or CheckpointError if the result could not be stored or served.
    """
    check_layout(recipe)
    why = draft.family.no_maths(draft.geometry)
    if why and (need := _need_of_maths(recipe)):
        raise PlanError(
            draft.checkpoint.folder,
            f"the recipe needs what its linears read ({need}), but {why}",
            fix="take a recipe that needs no traces (rounding nearest, scale absmax or mse,"
            " dynamic inputs), then compare what two servers accept: draftquant measure, then"
            " gate --measured",
        )
    layout, steps = get_layout(recipe.layout), []
    claimed = list(zip(draft.rows, claims(recipe, draft), strict=True))
    changed = changed_norms(recipe, draft, [i for _, i in claimed])
    check_groups(recipe, claimed)
    for row, index in claimed:
        rule = recipe.rules[index]
        action: StepAction = rule.action
        stored: tuple[StoredTensor, ...] = ()
        if action == "quantize":
            as_stored = recipe.of(rule).stored
            check_head(as_stored, row)
            stored = layout.stored(row.tensor, as_stored)
        elif action == "keep":
            action = changed.get(row.canonical, "keep")
            stored = (row.tensor.as_stored,)
        steps.append(Step(row=row, action=action, rule=index, stored=stored))
    layers = runtime_names.known_target_layers(draft.checkpoint, target_layers)
    plan = Plan(
        recipe=recipe,
        draft=draft,
        steps=tuple(steps),
        target_layers=layers,
        cache=cache_outputs(recipe, draft),
    )
    for check in (_count_problems, _fused_problems, _format_problems, _exclude_problems):
        for what, fix in check(plan):
            raise PlanError(f"recipe {recipe.name}", what, fix=fix)
    _check_names(plan)
    return plan


def _need_of_maths(recipe: Recipe) -> str | None:
    if recipe.algorithm.rounding != "nearest":
        return f"rounding {recipe.algorithm.rounding}"
    if recipe.kv_cache is not None:
        return "kv_cache"
    return None


def _count_problems(plan: Plan) -> Problems:
    if not plan.draft.family.has_maths:  # whose layers nobody has counted
        return
    layers, each = plan.draft.geometry.num_layers, plan.recipe.expect.quantized_per_layer
    each = min(each, plan.draft.family.linears_per_layer or each)
    names = (step.row.canonical for step in plan.quantized if step.row.role in LAYER_ROLES)
    count = len({without_expert(name) for name in names})
    if count != each * layers:
        wanted = each * layers
        yield (
            f"expect: {each} quantized linears in each of {layers} layer(s) make {wanted}, but the"
            f" rules quantize {count}",
            "correct the rules or 'expect'",
        )


def _fused_problems(plan: Plan) -> Problems:
    quantized = {step.row.module for step in plan.quantized}
    for group in plan.draft.scale_groups():
        some = sorted(quantized.intersection(group))
        if 0 < len(some) < len(group):
            yield (
                f"every engine fuses {', '.join(group)}, but the rules quantize only"
                f" {', '.join(some)}",
                "quantize all of them or none",
            )


def _format_problems(plan: Plan) -> Problems:
    """Fused linears must have one format, and so must linears of one name in all layers."""
    forms = {step.row.module: plan.format_of(step) for step in plan.quantized}
    for group in plan.draft.scale_groups():
        members = {module: forms[module] for module in group if module in forms}
        if len(set(members.values())) > 1:
            formats = "; ".join(f"{module} {form}" for module, form in members.items())
            yield (
                f"{', '.join(group)} are fused by every engine, but would have several formats:"
                f" {formats}",
                "give all of them the same format",
            )
    first: dict[str, str] = {}
    for module, form in forms.items():
        leaf = last_part(module)
        other = first.setdefault(leaf, module)
        if forms[other] != form:
            yield (
                f"{other} would have {forms[other]}, {module} {form}: engines number the layers of"
                f" a draft in their own way, so a format of {leaf!r} holds for all of them",
                f"give {leaf!r} the same format in every layer",
            )


def _exclude_problems(plan: Plan) -> Problems:
    """Excludes name the last part of a module, since engines number layers in their own ways."""
    kept = {last_part(name): name for name in plan.kept_modules()}
    for module in (step.row.module for step in plan.quantized):
        if (leaf := last_part(module)) in kept:
            yield (
                f"{module} would be quantized, {kept[leaf]} kept: engines number the layers of a"
                f" draft in their own way, so an exclude of {leaf!r} holds for all of them",
                f"quantize {leaf!r} in every layer or in none",
            )


def _check_names(plan: Plan) -> None:
    owners: dict[str, str] = {}
    for step in plan.steps:
        for tensor in step.stored:
            if tensor.name in owners:
                where = plan.draft.checkpoint.folder
                raise PlanError(
                    where,
                    f"{step.row.tensor.name} and {owners[tensor.name]} would both be stored as"
                    f" {tensor.name}",
                    fix="rename the stray tensor of the source",
                )
            owners[tensor.name] = step.row.tensor.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredInputs:
    """What is known about the linears' inputs: scales by on-disk module, cache scales by layer."""

    input_scales: Mapping[str, float] = field(default_factory=dict)
    input_scale_origin: str | None = None
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)
    statistics: "Statistics | None" = None
    found: "FoundCodes | None" = None
    prompts: SeenPrompts = NO_PROMPTS


NOTHING_MEASURED = MeasuredInputs()
