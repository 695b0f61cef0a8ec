"""A folder against the recipe and the input scales of the run that made it."""

import fnmatch
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...recipes.schema import Format, Recipe, Rule, WeightFormat
from ..drafts import Draft, Row
from ..drafts.fused import fused_names
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint, read_json_object
from ..files.provenance import Method
from ..stored.declarations import DeclaredScheme
from ..stored.declared_formats import declared_activations
from ..stored.decoded_numbers import stored_scalar
from ..stored.layouts.scheme import OwnFormat
from ..stored.parts import FLOAT_DTYPES, INPUT_SCALES, INVERSE_INPUT_SCALE, Part, scale_suffix
from .verify_report import Fault


def recorded_faults(run: Method, recorded: Method) -> list[Fault]:
    """What draftquant.json says is what the run did."""
    pairs = {
        "recipe": (run.recipe, recorded.recipe),
        "input_scales": (dict(run.input_scales), dict(recorded.input_scales)),
        "balanced": (dict(run.balanced), dict(recorded.balanced)),
        "learned_norms": (dict(run.learned_norms), dict(recorded.learned_norms)),
        "few_inputs": (dict(run.few_inputs), dict(recorded.few_inputs)),
        "cache_scales": (dict(run.cache_scales), dict(recorded.cache_scales)),
    }
    return [
        Fault(where=f"{PROVENANCE_FILE}: {key}", expected=f"that of the run: {ours}", got=f"{said}")
        for key, (ours, said) in pairs.items()
        if ours != said
    ]


def recipe_of(method: Method, row: Row) -> Recipe:
    """The recipe as it holds for a row: with format and algorithm of the rule that claims it.

    Experts that too few inputs reached are rounded to nearest.
    """
    recipe = method.recipe
    rule = claiming(recipe, row)
    own = recipe.of(rule) if rule is not None else recipe.in_format(recipe.formats[0])
    if row.module in method.few_inputs:
        return replace(own, algorithm=own.algorithm.to_nearest)
    return own


def own_formats(recipe: Recipe, draft: Draft, *, named_heads: bool) -> tuple[OwnFormat, ...]:
    """The linears of other formats than the recipe's own, for the complete declaration.

    Args:
        named_heads: engines find a head by its name alone: one of the recipe's own format as well.
    """
    found = []
    for form in recipe.formats:
        rows = [row for row in draft.rows if _format(recipe, row) == form]
        if form == recipe.formats[0]:
            rows = [row for row in rows if named_heads and row.role == "head"]
        modules = [row.module for row in rows]
        names = {name for module in modules for name in (module, *fused_names(module))}
        if names:
            leaves = tuple(sorted({_leaf(name) for name in names}))
            found.append(OwnFormat(recipe.in_format(form).stored, leaves))
    return tuple(found)


def _leaf(name: str) -> str:
    """The last part of a name, and the one before it where that is a number: "lm_heads.0"."""
    *before, leaf = name.split(".")
    return ".".join((*before[-1:], leaf)) if leaf.isdecimal() else leaf


def declared_faults(recipe: Recipe, scheme: DeclaredScheme | None, draft: Draft) -> list[Fault]:
    """What config.json declares is what the recipe asks for, for each linear where it has several.
    """
    where = f"{CONFIG_FILE}: quantization_config"
    if scheme is None:
        return [Fault(where=where, expected=f"that of recipe {recipe.name}", got="none")]
    wanted = recipe.kv_cache.dtype if recipe.kv_cache else None
    if wanted != scheme.kv_cache:
        expected = f"KV cache {wanted or 'of no format'} of recipe {recipe.name}"
        return [Fault(where=where, expected=expected, got=f"{scheme.kv_cache or 'none'}")]
    if len(recipe.formats) == 1 and not scheme.others:
        return _scheme_faults(where, recipe, scheme)
    faults = []
    for row in draft.rows:
        form, own = _format(recipe, row), scheme.of(row.module)
        place = f"{where}, {row.module}"
        if form is not None and own is None:
            faults.append(Fault(where=place, expected=f"a group for it: {form}", got="none"))
        elif form is not None and own is not None:
            faults += _scheme_faults(place, recipe.in_format(form), own)
    return faults


def _scheme_faults(where: str, recipe: Recipe, scheme: DeclaredScheme) -> list[Fault]:
    of, weights = f"of recipe {recipe.name}", recipe.weights.stored
    pairs = {
        "layout": (recipe.layout, scheme.layout.name),
        "weights": (weights.dtype, scheme.weight_dtype),
        "granularity": (weights.granularity, scheme.granularity),
        "group size": (weights.group_size, scheme.group_size),
        "first stage": (weights.first_stage, scheme.first_stage),
        "activations": (declared_activations(recipe.activations), scheme.activations),
    }
    return [
        Fault(where=where, expected=f"{key} {wanted} {of}", got=f"{found}")
        for key, (wanted, found) in pairs.items()
        if wanted != found
    ]


def action_faults(recipe: Recipe, draft: Draft, quantized: Collection[str]) -> list[Fault]:
    """What is quantized is what the rules of the recipe quantize."""
    faults = []
    for row in draft.rows:
        wanted, found = _quantizes(recipe, row), row.module in quantized
        if wanted != found:
            words = ["kept", "quantized"]
            expected = f"{words[wanted]} (recipe {recipe.name})"
            faults.append(Fault(where=row.module, expected=expected, got=words[found]))
    return faults


def _quantizes(recipe: Recipe, row: Row) -> bool:
    """What no rule claims is kept."""
    rule = claiming(recipe, row)
    return rule is not None and rule.action == "quantize"


def _format(recipe: Recipe, row: Row) -> Format | None:
    """In which a row is quantized; None where it is kept."""
    return recipe_of(Method(recipe=recipe), row).formats[0] if _quantizes(recipe, row) else None


def claiming(recipe: Recipe, row: Row) -> Rule | None:
    """The rule that claims a row, by name first, then by role; None = none does."""
    names = (row.tensor.name, row.canonical)
    by_name = [
        rule
        for rule in recipe.rules
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.tensor for name in names)
    ]
    by_role = [rule for rule in recipe.rules if row.role in rule.role]
    return next(iter(by_name or by_role), None)


def own_parts(
    parts: Mapping[str, Part], weights: WeightFormat, scheme: DeclaredScheme, scale_dtype: str
) -> dict[str, Part]:
    """The stored tensors of a linear with the one dtype of each that this package writes.

    Scales in floats are float32, those of INT4 in one stage float16 where the recipe says so, else
    of `scale_dtype`.
    """
    exact = dict(parts)
    for suffix, part in parts.items():
        if not set(part.dtypes) & set(FLOAT_DTYPES):
            continue
        dtype = "F32"
        if suffix == scale_suffix(scheme) and weights.number.is_integer and not weights.first_stage:
            dtype = "F16" if weights.scale_dtype else scale_dtype
        exact[suffix] = part._replace(dtypes=(dtype,), or_shape=None)
    return exact


def input_scale_faults(
    method: Method, draft: Draft, output: Checkpoint, complete: Collection[str]
) -> list[Fault]:
    """Stored scales of inputs are those of the run, bit for bit.
    """
    where = f"{PROVENANCE_FILE}: input_scales"
    needing = {
        row.module
        for row in draft.rows
        if (form := _format(method.recipe, row)) and form.needs_input_scale
    }
    given = ", ".join(sorted(method.input_scales.keys() - needing))
    faults = [Fault(where=where, expected="none (recipe)", got=given)] if given else []
    for module in sorted(needing.intersection(complete)):
        if module not in method.input_scales:
            faults.append(Fault(where=where, expected=f"one of {module}", got="none"))
            continue
        names = (f"{module}.{suffix}" for suffix in INPUT_SCALES)
        for name in (name for name in names if name in output.tensors):
            divides = name.endswith(INVERSE_INPUT_SCALE)
            wanted = _stored_input_scale(method.input_scales[module], divides=divides)
            found = stored_scalar(output, output.tensors[name])
            if found != wanted:
                expected = f"{wanted:.9g} (that of the run)"
                faults.append(Fault(where=name, expected=expected, got=f"{found:.9g}"))
    return faults


def _stored_input_scale(scale: float, *, divides: bool) -> float:
    with np.errstate(all="ignore"):  # 0 and infinity are faults of their own
        return float(np.float32(1) / np.float32(scale) if divides else np.float32(scale))


_DECLARATION = "quantization_config"


def complete_faults(
    recipe: Recipe, scheme: DeclaredScheme, draft: Draft, output: Checkpoint
) -> list[Fault]:
    """config.json, and the layout's own file, declare just what this package writes for a recipe.

    Which modules are excluded is judged by what the excludes match, see `exclude_faults`.
    """
    layout = scheme.layout
    own = recipe.in_format(recipe.formats[0]).stored
    others = own_formats(recipe, draft, named_heads=layout.names_heads)
    wanted = layout.complete(own, list(scheme.excludes), others)
    found = output.config.get(_DECLARATION)
    faults = list(_differences(f"{CONFIG_FILE}: {_DECLARATION}", wanted, found))
    if layout.side_file and (output.folder / layout.side_file.name).is_file():
        name = layout.side_file.name
        content = read_json_object(output.folder / name, "quantize the draft again")
        faults += _differences(name, layout.side_file.complete(wanted), content)
    return faults


def _differences(where: str, wanted: object, found: object) -> Iterator[Fault]:
    """Every innermost key with another value, as JSON tells values apart."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            inner = f"{where}.{key}" if where.count(":") else f"{where}: {key}"
            if key in wanted and key in found:
                yield from _differences(inner, wanted[key], found[key])
            else:
                yield Fault(where=inner, expected=_text(wanted, key), got=_text(found, key))
    elif json.dumps(wanted, sort_keys=True) != json.dumps(found, sort_keys=True):
        yield Fault(where=where, expected=json.dumps(wanted), got=json.dumps(found))


def _text(mapping: Mapping[str, Any], key: str) -> str:
    return json.dumps(mapping[key]) if key in mapping else "no such key"
