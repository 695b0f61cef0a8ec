"""What is demanded of a folder: by its record, its recipe, and the declaration of each linear."""

import fnmatch
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...recipes.schema import Format, Recipe, Rule, WeightFormat
from ..drafts import Draft, Row
from ..drafts.engine_traits import fused_names
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint, read_json_object
from ..files.provenance import (
    CutProvenance,
    Method,
    QuantizedProvenance,
    TranscodedProvenance,
)
from ..files.provenance_file import sealed
from ..files.safetensors_header import WORKERS, TensorInfo
from ..stored.decoded_numbers import stored_scalar
from ..stored.layouts.scheme import (
    FLOAT_DTYPES,
    DeclaredScheme,
    OwnFormat,
    Part,
    declared_activations,
)
from ..stored.linear import INVERSE_SCALE
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_tables import StoredTables
from .comparison import Compared, Fault, differing
from .scales import Demand, matrix_absmax, rule_of

Record = QuantizedProvenance | TranscodedProvenance
"""What a folder that holds codes has to have."""
NO_RECORD = Fault(
    PROVENANCE_FILE,
    "the record of the run",
    "none. If another tool made the folder, pass --foreign",
)
_DECLARATION = "quantization_config"
_DECLARED = f"{CONFIG_FILE}: {_DECLARATION}"


def recorded(pairs: Mapping[str, tuple[object, object]]) -> list[Fault]:
    """`differing` for the values of draftquant.json."""
    return differing(f"{PROVENANCE_FILE}: ", pairs)


_MOST_NAMED = 3
"""Lines on digests: of another draft all differ."""


def digest_pairs(
    key: str, computed: Mapping[str, str], declared: Mapping[str, str]
) -> dict[str, tuple[object, object]]:
    """Both digests of tensors on which they disagree: of two, and how many more there are."""
    names = sorted(declared.keys() | computed.keys())
    wrong = [name for name in names if computed.get(name) != declared.get(name)]
    named = wrong if len(wrong) <= _MOST_NAMED else wrong[: _MOST_NAMED - 1]
    pairs: dict[str, tuple[object, object]] = {
        f"{key}.{name}": (computed.get(name), declared.get(name)) for name in named
    }
    if more := len(wrong) - len(named):
        pairs[f"{key} of {more} more tensors"] = "as computed", "others"
    return pairs


def record_faults(
    record: Record | CutProvenance, draft: Draft, output: Checkpoint, compared: Compared
) -> list[Fault]:
    """Faults in what a record says of a folder and its source, as far as it shows; and its seal."""
    pairs = digest_pairs("tensor_digests", compared.output_digests, record.tensor_digests)
    if not isinstance(record, TranscodedProvenance):
        of_source = compared.source_digests, record.source.tensor_digests
        pairs |= digest_pairs("source.tensor_digests", *of_source)
        pairs["source.family"] = draft.family.name, record.source.family
        pairs["tensor_bytes.before"] = draft.checkpoint.nbytes, record.tensor_bytes.before
        pairs["tensor_bytes.after"] = output.nbytes, record.tensor_bytes.after
    pairs["sha256"] = sealed(record).sha256, record.sha256 or "none"
    return recorded(pairs)


def method_faults(run: Method, declared: Method) -> list[Fault]:
    """Faults where draftquant.json does not say what the run did."""
    pairs = {name: (value, declared.keys[name]) for name, value in run.keys.items()}
    return differing(f"{PROVENANCE_FILE}: ", pairs, "that of the run: {}")


def claiming(recipe: Recipe, row: Row) -> Rule | None:
    """The rule that claims a row, by name first, then by role; None means that the row is kept."""
    names = (row.tensor.name, row.canonical)
    by_name = [
        rule
        for rule in recipe.rules
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.tensor for name in names)
    ]
    by_role = [rule for rule in recipe.rules if row.role in rule.role]
    return next(iter(by_name or by_role), None)


def recipe_of(method: Method, row: Row) -> Recipe:
    """The recipe for a row: with the format and algorithm of the rule that claims it."""
    recipe = method.recipe
    rule = claiming(recipe, row)
    of_rule = recipe.of(rule) if rule is not None else recipe.in_format(recipe.formats[0])
    if row.module in method.few_inputs:
        return replace(of_rule, algorithm=of_rule.algorithm.to_nearest)
    return of_rule


def _format(recipe: Recipe, row: Row) -> Format | None:
    """The format in which a row is quantized; None where it is kept."""
    rule = claiming(recipe, row)
    if rule is None or rule.action != "quantize":
        return None
    return rule.format or recipe.formats[0]


def action_faults(recipe: Recipe, draft: Draft, quantized: Collection[str]) -> Iterator[Fault]:
    """Faults unless exactly the rows are quantized that the rules of the recipe quantize."""
    words = ["kept", "quantized"]
    for row in draft.rows:
        wanted, is_quantized = _format(recipe, row) is not None, row.module in quantized
        if wanted != is_quantized:
            yield Fault(row.module, f"{words[wanted]} (recipe {recipe.name})", words[is_quantized])


def dropped_rows(recipe: Recipe, draft: Draft) -> tuple[Row, ...]:
    """The tables of a draft that a recipe leaves to the target, which has equal ones."""
    claimed = ((row, claiming(recipe, row)) for row in draft.rows)
    return tuple(row for row, rule in claimed if rule is not None and rule.action == "drop")


def remaining(draft: Draft, dropped: Collection[Row]) -> Draft:
    """The draft without some tables."""
    return replace(draft, rows=tuple(row for row in draft.rows if row not in dropped))


def dropped_faults(
    draft: Draft, dropped: Collection[Row], record: QuantizedProvenance | None, target: Path | None
) -> Iterator[Fault]:
    """The tables recorded as dropped are those that the recipe drops, and equal the target's."""
    names = sorted(row.tensor.name for row in dropped)
    on_record = names if record is None else sorted(record.dropped)
    yield from recorded({"dropped": (", ".join(names) or "none", ", ".join(on_record) or "none")})
    if target is None or not dropped:
        return
    tables = StoredTables.find(target)
    for row in dropped:
        problem = tables.difference(draft.checkpoint, row.tensor, row.canonical)
        if problem is not None:
            yield Fault(row.tensor.name, "the target's table, which stands for it", f"it {problem}")


def declared_faults(recipe: Recipe, scheme: DeclaredScheme | None, draft: Draft) -> Iterator[Fault]:
    """config.json declares what the recipe asks for; with several formats, for each linear."""
    wanted = recipe.kv_cache.dtype if recipe.kv_cache else None
    if scheme is None:
        yield Fault(_DECLARED, f"that of recipe {recipe.name}", "none")
    elif wanted != scheme.kv_cache:
        expected = f"KV cache {wanted or 'of no format'} of recipe {recipe.name}"
        yield Fault(_DECLARED, expected, f"{scheme.kv_cache or 'none'}")
    elif len(recipe.formats) == 1 and not scheme.others:
        yield from _scheme_faults(_DECLARED, recipe, scheme)
    else:
        for row in draft.rows:
            form, module_scheme = _format(recipe, row), scheme.of(row.module)
            place = f"{_DECLARED}, {row.module}"
            if form is not None and module_scheme is None:
                yield Fault(place, f"a group for it: {form}", "none")
            elif form is not None and module_scheme is not None:
                yield from _scheme_faults(place, recipe.in_format(form), module_scheme)


def _scheme_faults(where: str, recipe: Recipe, scheme: DeclaredScheme) -> list[Fault]:
    weights = recipe.weights.stored
    pairs = {
        "layout": (recipe.layout, scheme.layout.name),
        "weights": (weights.dtype, scheme.weight_dtype),
        "granularity": (weights.granularity, scheme.granularity),
        "group size": (weights.group_size, scheme.group_size),
        "first stage": (weights.first_stage, scheme.first_stage),
        "activations": (declared_activations(recipe.activations), scheme.activations),
    }
    return [
        Fault(where, f"{key} {wanted} of recipe {recipe.name}", f"{got}")
        for key, (wanted, got) in pairs.items()
        if wanted != got
    ]


def own_parts(
    parts: Mapping[str, Part], weights: WeightFormat, scheme: DeclaredScheme, scale_dtype: str
) -> dict[str, Part]:
    """The stored tensors of a linear, each with the one dtype that this package writes.

    Scales in floats are float32; INT4 scales of one stage are float16 where the recipe says so,
    else they have `scale_dtype`.
    """
    exact = dict(parts)
    for suffix, part in parts.items():
        if not set(part.dtypes) & set(FLOAT_DTYPES):
            continue
        dtype, is_scale = "F32", suffix == scheme.layout.scale_suffix(scheme)
        if is_scale and weights.number.is_integer and not weights.first_stage:
            dtype = "F16" if weights.scale_dtype else scale_dtype
        exact[suffix] = part._replace(dtypes=(dtype,), or_shape=None)
    return exact


def input_scale_faults(
    method: Method, draft: Draft, output: Checkpoint, complete: Collection[str]
) -> Iterator[Fault]:
    """Stored scales of inputs, of linears with all their tensors, equal the run's bit for bit."""
    where = f"{PROVENANCE_FILE}: input_scales"
    forms = ((row.module, _format(method.recipe, row)) for row in draft.rows)
    needing = {module for module, form in forms if form and form.needs_input_scale}
    if given := ", ".join(sorted(method.input_scales.keys() - needing)):
        yield Fault(where, "none (recipe)", given)
    for module in sorted(needing.intersection(complete)):
        if module not in method.input_scales:
            yield Fault(where, f"one of {module}", "none")
            continue
        names = (f"{module}.{suffix}" for suffix in INPUT_SCALES)
        for name in (name for name in names if name in output.tensors):
            with np.errstate(all="ignore"):  # 0 and infinity are faults of their own
                scale = np.float32(method.input_scales[module])
                divides = name.endswith(INVERSE_INPUT_SCALE)
                wanted = float(np.float32(1) / scale if divides else scale)
            yield from other_scalar(output, output.tensors[name], wanted)


def other_scalar(output: Checkpoint, tensor: TensorInfo, wanted: float) -> Iterator[Fault]:
    """A stored scale equals that of the run, bit for bit."""
    stored = stored_scalar(output, tensor)
    if stored != wanted:
        yield Fault(tensor.name, f"{wanted:.9g} (that of the run)", f"{stored:.9g}")


def complete_faults(
    recipe: Recipe, scheme: DeclaredScheme, draft: Draft, output: Checkpoint
) -> Iterator[Fault]:
    """config.json, and the layout's own file, declare what this package writes for a recipe."""
    layout = scheme.layout
    stored = recipe.in_format(recipe.formats[0]).stored
    others = _own_formats(recipe, draft, named_heads=layout.names_heads)
    wanted = layout.declaration(stored, list(scheme.excludes), others)
    yield from _differences(_DECLARED, wanted, output.config.get(_DECLARATION))
    if layout.side_file and (output.folder / layout.side_file.name).is_file():
        name = layout.side_file.name
        content = read_json_object(output.folder / name, "quantize the draft again")
        yield from _differences(name, layout.side_file.content(wanted), content)


def _own_formats(recipe: Recipe, draft: Draft, *, named_heads: bool) -> tuple[OwnFormat, ...]:
    """Linears in other formats than the recipe's own, and a head in it where it needs a name."""
    formats = []
    for form in recipe.formats:
        rows = [row for row in draft.rows if _format(recipe, row) == form]
        if form == recipe.formats[0]:
            rows = [row for row in rows if named_heads and row.role == "head"]
        modules = [row.module for row in rows]
        names = {name for module in modules for name in (module, *fused_names(module))}
        if names:
            leaves = tuple(sorted({_leaf(name) for name in names}))
            formats.append(OwnFormat(recipe.in_format(form).stored, leaves))
    return tuple(formats)


def _leaf(name: str) -> str:
    """The last part of a name, with the one before it if the last is a number: "lm_heads.0"."""
    *before, leaf = name.split(".")
    return ".".join((*before[-1:], leaf)) if leaf.isdecimal() else leaf


def _differences(where: str, wanted: object, got: object) -> Iterator[Fault]:
    """Every innermost key with another value, as JSON tells values apart."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        for key in sorted(wanted.keys() | got.keys()):
            inner = f"{where}.{key}" if where.count(":") else f"{where}: {key}"
            if key in wanted and key in got:
                yield from _differences(inner, wanted[key], got[key])
            else:
                yield Fault(inner, said_of(wanted, key), said_of(got, key))
    elif json.dumps(wanted, sort_keys=True) != json.dumps(got, sort_keys=True):
        yield Fault(where, json.dumps(wanted), json.dumps(got))


def said_of(mapping: Mapping[str, Any], key: str) -> str:
    """A value as text that tells 1 from true and 1.0; "no such key" is not valid JSON."""
    return json.dumps(mapping[key], sort_keys=True) if key in mapping else "no such key"


def is_regrouped(record: Record | None, scheme: DeclaredScheme | None) -> bool:
    """Whether NVFP4 has the scales of MXFP4, by the record of a transcoded folder."""
    before = record.transcoded_from if record is not None else None
    was = before is not None and before.weights.number.powers_of_two
    return was and scheme is not None and scheme.number.global_scale


def demands_of(
    draft: Draft, scheme: DeclaredScheme | None, method: Method | None, record: Record | None
) -> dict[str, Demand]:
    """The demand on every matrix of the source, quantized or not, by on-disk module name.

    The folder's record says how codes and scales were computed, or else the recipe of the run.
    """
    before = record.transcoded_from if record is not None else None
    weights = method.recipe.weights if method else before.weights if before else None
    demands = {}
    for row in draft.linears():
        module_scheme = scheme.of(row.module) if scheme is not None else None
        used = None if method is None else replace(method, recipe=recipe_of(method, row))
        carried, scale_dtype = None, row.tensor.dtype
        if weights is not None:
            carries = module_scheme is not None and module_scheme.weight_dtype != weights.dtype
            carries = carries and weights.number.is_integer
            carries = weights.carrier is not None or (method is None and carries)
            carried = weights.dtype if carries else None
            scale_dtype = "F16" if weights.scale_dtype else scale_dtype
        inverse = f"{row.module}.{INVERSE_SCALE}"
        demands[row.module] = Demand(
            scheme=module_scheme,
            recipe=used.recipe if used else None,
            rule=rule_of(used, regrouped=is_regrouped(record, module_scheme)),
            carried=carried,
            scale_dtype=before.scale_dtype if before else scale_dtype,
            from_inverse=before is not None and inverse in before.tensor_digests,
        )
    return demands


def whole_demands(
    draft: Draft,
    demands: Mapping[str, Demand],
    quantized: Collection[str],
    exponents: Mapping[str, int],
) -> dict[str, Demand]:
    """The demands on quantized linears, completed by `exponents` and the scales of matrices.

    Where a scale of the whole matrix is demanded exactly, the source is read once beforehand.
    `exponents` are those of `ChangedNorms`, by tensor name.
    """
    rows = {row.module: row.tensor for row in draft.linears() if row.module in quantized}
    by_module = {m: replace(demands[m], exponent=exponents.get(t.name, 0)) for m, t in rows.items()}
    exact = [m for m, demand in by_module.items() if demand.rule.scales in ("absmax", "searched")]
    whole = [m for m in exact if (declared := by_module[m].scheme) and declared.scales_whole_matrix]
    with ThreadPoolExecutor(WORKERS) as pool:
        of = partial(matrix_absmax, draft.checkpoint)
        largest = pool.map(lambda m: of(rows[m], by_module[m].exponent), whole)
        absmax = dict(zip(whole, largest, strict=True))
    for group in (*draft.scale_groups(), *((module,) for module in whole)):
        members = tuple(module for module in group if module in absmax)
        for module in members:
            if by_module[module].largest is None:
                of_group = max(absmax[member] for member in members)
                by_module[module] = replace(by_module[module], largest=of_group, group=members)
    return by_module
