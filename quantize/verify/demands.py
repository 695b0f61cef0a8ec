"""What is demanded of each linear: by what is declared for it, and by how its codes were found.

Linears of one folder may have several formats, and an algorithm treats each in its own way.
"""

import fnmatch
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...recipes.errors import CheckpointError
from ...recipes.formats import WeightDtype
from ...recipes.schema import Format, Recipe, Rule, WeightFormat
from ..drafts import Draft, Row
from ..drafts.engine_traits import fused_names
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint, read_json_object
from ..files.provenance import (
    CutProvenance,
    DequantizedProvenance,
    GraftedProvenance,
    Method,
    QuantizedProvenance,
    TranscodedProvenance,
)
from ..files.provenance_file import read_provenance, sealed
from ..stored.decoded_numbers import stored_scalar
from ..stored.layouts import DeclaredScheme
from ..stored.layouts.scheme import FLOAT_DTYPES, OwnFormat, Part
from ..stored.linear import INVERSE_SCALE
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE, scale_suffix
from ..stored.stored_draft import declared_activations
from ..stored.stored_tables import StoredTables
from .codes import Expected
from .scales import Rule as DemandsRule
from .scales import matrix_absmax, rule_of
from .verify_report import Fault

# ---- A folder against the recipe and the input scales of the run that made it


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
    """What config.json declares is what the recipe asks for, for each linear where it has several."""
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
    """Stored scales of inputs are those of the run, bit for bit."""
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


# ---- Tables that a folder leaves to its target: absent because the target has the very same ones
#
# Shown by comparing them byte for byte, before they are dropped and whenever the target is at
# hand.


def dropped_rows(recipe: Recipe, draft: Draft) -> tuple[Row, ...]:
    """The tables of a draft that a recipe leaves to the target."""
    rules = ((row, claiming(recipe, row)) for row in draft.rows)
    return tuple(row for row, rule in rules if rule is not None and rule.action == "drop")


def remaining(draft: Draft, dropped: Collection[Row]) -> Draft:
    """The draft as it is without some tables."""
    return replace(draft, rows=tuple(row for row in draft.rows if row not in dropped))


def dropped_faults(
    draft: Draft,
    dropped: Collection[Row],
    recorded: QuantizedProvenance | None,
    target: Path | None,
) -> list[Fault]:
    """What is recorded of dropped tables is what the recipe drops, and equals the target's.

    Args:
        recorded: draftquant.json of the folder; None for a run that has not written it yet.
        target: folder of the target; None = nothing is shown.

    Raises:
        CheckpointError: the target has no such tables.
    """
    faults = []
    names = sorted(row.tensor.name for row in dropped)
    if recorded is not None and sorted(recorded.dropped) != names:
        where, got = f"{PROVENANCE_FILE}: dropped", ", ".join(sorted(recorded.dropped)) or "none"
        faults.append(Fault(where=where, expected=", ".join(names) or "none", got=got))
    if target is None or not dropped:
        return faults
    tables = StoredTables.find(target)
    for row in dropped:
        problem = tables.difference(draft.checkpoint, row.tensor, row.canonical)
        if problem is not None:
            expected = "the target's table, which stands for it"
            faults.append(Fault(where=row.tensor.name, expected=expected, got=f"it {problem}"))
    return faults


# ---- draftquant.json against what it speaks of: all that can be computed again, and its seal

Record = QuantizedProvenance | TranscodedProvenance
"""Of a folder that holds codes."""
NO_RECORD = Fault(
    where=PROVENANCE_FILE,
    expected="the record of the run",
    got="none. If another tool made the folder, pass --foreign",
)


def read_record(folder: Path) -> Record | CutProvenance | None:
    """What this package recorded when it made or cut a folder; None = nothing.

    Raises:
        CheckpointError: draftquant.json is damaged, or that of a dequantized folder.
    """
    recorded = read_provenance(folder)
    if isinstance(recorded, DequantizedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "there is nothing to verify: the folder was dequantized, and holds no quantized values",
            fix="verify the quantized folder that it was made from",
        )
    if isinstance(recorded, GraftedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "the folder is a target's, into which an MTP layer was grafted",
            fix="draftquant verify it --against the target as it was",
        )
    return recorded


def recorded_changes(recorded: Record | None) -> Mapping[str, object] | None:
    """None where nothing says what config.json must be: it is another tool's."""
    return recorded.config_changes if isinstance(recorded, QuantizedProvenance) else None


def record_faults(
    recorded: Record | CutProvenance,
    draft: Draft,
    output: Checkpoint,
    source_digests: Mapping[str, str],
    output_digests: Mapping[str, str],
) -> list[Fault]:
    """What a record says is so."""
    faults = _hash_faults("tensor_digests", recorded.digests, output_digests)
    if not isinstance(recorded, TranscodedProvenance):
        source = recorded.source
        faults += _hash_faults("source.tensor_digests", source.digests, source_digests)
        faults += _value_faults(
            {
                "source.family": (draft.family.name, source.family),
                "tensor_bytes.before": (draft.checkpoint.nbytes, recorded.tensor_bytes.before),
                "tensor_bytes.after": (output.nbytes, recorded.tensor_bytes.after),
            }
        )
    seal = sealed(recorded).sha256
    return faults + _value_faults({"sha256": (seal, recorded.sha256 or "none")})


def _hash_faults(key: str, said: Mapping[str, str], computed: Mapping[str, str]) -> list[Fault]:
    names = sorted(said.keys() | computed.keys())
    return _value_faults({f"{key}.{name}": (computed.get(name), said.get(name)) for name in names})


def _value_faults(pairs: Mapping[str, tuple[object, object]]) -> list[Fault]:
    return [
        Fault(where=f"{PROVENANCE_FILE}: {key}", expected=str(wanted), got=str(said))
        for key, (wanted, said) in pairs.items()
        if wanted != said
    ]


class Origin(NamedTuple):
    """How codes and scales were computed, where what is stored does not say it.

    Attributes:
        carried: number format of the codes, where a wider one carries them; else None.
        scale_dtype: safetensors dtype to which INT4 scales were rounded; None = the weight's.
        from_inverse: it was transcoded from a folder that stores the inverse of its global scale.
    """

    carried: WeightDtype | None
    scale_dtype: str | None
    from_inverse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Of one linear.

    Attributes:
        scheme: what is declared for it; None where nothing is.
        recipe: as it holds for it; None where another tool made the folder.
        rule: what its codes and scales are held to.
        origin: what they were before they were stored.
    """

    scheme: DeclaredScheme | None
    recipe: Recipe | None
    rule: DemandsRule
    origin: Origin

    @property
    def scales_follow(self) -> bool:
        """True if it has a scale of the whole matrix that the source says exactly."""
        whole = self.scheme is not None and self.scheme.scales_whole_matrix
        return whole and self.rule.by_absmax


def demands_of(
    draft: Draft, scheme: DeclaredScheme | None, method: Method | None, recorded: Record | None
) -> dict[str, Demand]:
    """Of every matrix of the source, quantized or not, by on-disk module name.

    Raises:
        VerifyError: nothing is known of the recipe's algorithm.
    """
    found = {}
    for row in draft.linears():
        own = scheme.of(row.module) if scheme is not None else None
        used = None if method is None else replace(method, recipe=recipe_of(method, row))
        found[row.module] = Demand(
            scheme=own,
            recipe=used.recipe if used else None,
            rule=rule_of(used),
            origin=origin_of(row.module, own, used, recorded),
        )
    return found


def expected_codes(
    pool: ThreadPoolExecutor,
    draft: Draft,
    demands: Mapping[str, Demand],
    quantized: Collection[str],
    exponents: Mapping[str, int],
) -> dict[str, Expected]:
    """What is demanded of each quantized linear beside its own weight, by module.

    Where a scale of the whole matrix is demanded exactly, the source is read once before: codes and
    scales under it follow from it, also where only its rounded inverse is stored.

    Args:
        exponents: by tensor name, see `ChangedNorms`.
    """
    rows = {row.module: row.tensor for row in draft.linears() if row.module in quantized}
    expected = {
        module: Expected(
            rule=demands[module].rule,
            exponent=exponents.get(tensor.name, 0),
            carried=demands[module].origin.carried,
            scale_dtype=demands[module].origin.scale_dtype or tensor.dtype,
            from_inverse=demands[module].origin.from_inverse,
        )
        for module, tensor in rows.items()
    }
    whole = [module for module in rows if demands[module].scales_follow]
    found = pool.map(
        lambda module: matrix_absmax(draft.checkpoint, rows[module], expected[module].exponent),
        whole,
    )
    absmax = dict(zip(whole, found, strict=True))
    for group in (*draft.fused_groups(), *((module,) for module in whole)):
        members = tuple(module for module in group if module in absmax)
        for module in members:
            if expected[module].largest is None:
                largest = max(absmax[member] for member in members)
                expected[module] = replace(expected[module], largest=largest, group=members)
    return expected


def origin_of(
    module: str, scheme: DeclaredScheme | None, method: Method | None, recorded: Record | None
) -> Origin:
    """What the record of a folder says of this, or the recipe of the run that is writing it."""
    before = recorded.transcoded_from if recorded is not None else None
    weights = method.recipe.weights if method is not None else before.weights if before else None
    if weights is None:
        return Origin(None, None, from_inverse=False)
    carries = scheme is not None and scheme.weight_dtype != weights.dtype
    carried = weights.dtype if weights.carrier or (method is None and carries) else None
    scale_dtype = "F16" if weights.scale_dtype else None
    return Origin(
        carried=carried,
        scale_dtype=before.scale_dtype if before else scale_dtype,
        from_inverse=before is not None and f"{module}.{INVERSE_SCALE}" in before.digests,
    )
