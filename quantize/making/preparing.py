"""What must hold before a plan is carried out, and which norms change beside the weights."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from ...recipes.brief import first_of
from ...recipes.errors import PASS_TRACES, BackendError, CheckpointError, PlanError
from ...recipes.schema import Recipe
from ..algorithms import FoundCodes
from ..backends import get_backend
from ..drafts import Draft, Row
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE
from ..files.provenance import CutProvenance, VocabularyCut
from ..files.provenance_file import check_seal, read_provenance
from ..files.publish import check_no_other_weights
from ..lints.value_lints import balance_exponent, half_ratios
from ..planning.outputs import ONLY_OF_CODES, checked_cache_scales
from ..planning.quantization_plan import MeasuredInputs, Plan
from ..stored.decoded_numbers import floats, read_whole
from ..stored.stored_declaration import looks_quantized, raw_declaration
from ..stored.stored_tables import EMBEDDING, StoredTables, first_differing_row


def check_backends(recipe: Recipe) -> None:
    """Fail before any work if the recipe's toolkit or algorithm cannot handle a format of it."""
    for form in recipe.formats:
        each = recipe.in_format(form)
        get_backend(each.backend, each.algorithm).check(each.weights)


def check_tables(plan: Plan, target: Path | None) -> dict[str, str]:
    """Prove that dropped tables are the target's (name -> its name there), and a head untied."""
    _check_untied(plan)
    return prove_dropped(plan.draft, [step.row for step in plan.dropped], target)


def prove_dropped(draft: Draft, dropped: Collection[Row], target: Path | None) -> dict[str, str]:
    """Show that the target has every table that is to be dropped: name -> the target's name."""
    if not dropped:
        return {}
    if target is None:
        names = " and ".join(row.tensor.name for row in dropped)
        raise PlanError(
            draft.checkpoint.folder,
            f"the recipe drops {names}, but without the target it cannot be proven that the target"
            " has the same tensor",
            fix="give the target's folder (--target M), or keep it",
        )
    tables = StoredTables.find(target)
    for row in dropped:
        problem = tables.difference(draft.checkpoint, row.tensor, row.canonical)
        if problem is not None:
            where = f"{draft.checkpoint.folder}: {row.tensor.name}"
            raise CheckpointError(
                where,
                f"{problem}, and only a tensor that equals the target's byte for byte can be"
                " dropped",
                fix="keep it, or give the target that this draft was trained for",
            )
    return {row.tensor.name: tables.table(row.canonical).name for row in dropped}


def _check_untied(plan: Plan) -> None:
    embedding = plan.draft.row(EMBEDDING)
    for step in plan.quantized:
        if step.row.role != "head" or embedding is None:
            continue
        ours, other = step.row.tensor, embedding.tensor
        alike = (ours.dtype, ours.shape) == (other.dtype, other.shape)
        source = plan.draft.checkpoint
        if alike and first_differing_row(source, ours, source, other) is None:
            where = f"{source.folder}: {ours.name}"
            raise PlanError(
                where,
                f"the recipe quantizes it, but it equals {other.name} byte for byte: the two are"
                " tied, and quantizing one would change it without the other",
                fix="keep the head, or drop both where the target has them (action: drop)",
            )


def check_source(plan: Plan) -> tuple[tuple[str, ...], tuple[VocabularyCut, ...]]:
    """The side files to copy from an unquantized source, and how the source was cut before."""
    folder, side_files = plan.draft.checkpoint.folder, plan.draft.checkpoint.side_files()
    check_no_other_weights(folder, side_files, travel="unquantized", made="quantized")
    record = read_provenance(folder)
    cuts: tuple[VocabularyCut, ...] = ()
    if isinstance(record, CutProvenance) and record.quantized_by is None:
        check_seal(folder, record)
        cuts = record.cuts
    where, what = None, "is already the result of a quantization"
    if PROVENANCE_FILE in side_files and not cuts:
        where = folder / PROVENANCE_FILE
    elif looks_quantized(plan.draft.checkpoint):
        declared = raw_declaration(plan.draft.checkpoint)
        where = declared.where if declared else folder / CONFIG_FILE
        what = "is quantized already (it declares a quantization_config)"
    if where is not None:
        raise CheckpointError(where, f"the source {what}", fix="start from the BF16 draft")
    return tuple(file for file in side_files if file not in ONLY_OF_CODES), cuts


def checked_measured(
    plan: Plan, measured: MeasuredInputs
) -> tuple[dict[str, float], dict[str, float]]:
    """Static input scales, and those of the cache; BackendError where the recipe needs traces."""
    recipe, known = plan.recipe, measured.statistics or measured.found
    if recipe.algorithm.rounding != "nearest" and known is None:
        raise BackendError(
            f"recipe {recipe.name}",
            f"{recipe.algorithm} must know the inputs of the linears",
            fix=PASS_TRACES,
        )
    scales = checked_scales(plan, measured.input_scales)
    return scales, checked_cache_scales(recipe, plan.draft, measured.cache_scales)


def checked_scales(plan: Plan, scales: Mapping[str, float] | None) -> dict[str, float]:
    """Static input scales, which are given exactly where the recipe needs them."""
    modules = [s.row.module for s in plan.quantized if plan.format_of(s).needs_input_scale]
    if not plan.recipe.needs_input_scales:
        if scales:
            raise BackendError(
                f"recipe {plan.recipe.name}",
                "input scales are given, but the recipe's activations are not static",
                fix="leave --input-scale out, or use a recipe with static activations",
            )
        return {}
    missing = [module for module in modules if module not in (scales or {})]
    if scales is None or missing:
        static = next(form.activations for form in plan.recipe.formats if form.needs_input_scale)
        where = f"recipe {plan.recipe.name}"
        raise BackendError(
            where,
            f"activations are {static}, so each linear needs a static scale of its input. Missing:"
            f" {first_of(missing)}",
            fix=f"{PASS_TRACES}. Or use a recipe without static scales (fp8-ptpc), or pass"
            " --input-scale 1.0",
        )
    return {module: scales[module] for module in modules}


def balanced_norms(plan: Plan) -> dict[str, int]:
    """The norms that balancing changes, with halves 4 apart: name -> k, divided by 2^k."""
    if plan.balanced is None:
        return {}
    norm, _ = plan.balanced
    exponent = balance_exponent([ratio.ratio for ratio in half_ratios(plan.draft)])
    return {norm.row.tensor.name: exponent} if exponent else {}


def balance_exponents(plan: Plan, balanced: Mapping[str, int]) -> dict[str, int]:
    """For balanced norms and the linears after them: on-disk module name -> k of 2^k."""
    exponents = {name.removesuffix(".weight"): k for name, k in balanced.items()}
    if plan.balanced is not None and exponents:
        _, linears = plan.balanced
        exponents |= dict.fromkeys((step.row.module for step in linears), *exponents.values())
    return exponents


def learned_norms(
    plan: Plan, codes: FoundCodes | None, balanced: Mapping[str, int]
) -> dict[str, float]:
    """The norms that learned: name -> the largest factor of an element, without balancing."""
    if codes is None:
        return {}
    factors = {}
    for step in plan.learned_norms:
        tensor = step.row.tensor
        source = floats(read_whole(plan.draft.checkpoint, tensor), tensor.dtype).astype(np.float64)
        before = np.abs(source * 2.0 ** -balanced.get(tensor.name, 0))
        after = codes.weight(step.row.canonical_module).double().abs().numpy()
        larger, smaller = np.maximum(before, after), np.minimum(before, after)
        moved = larger > 0
        factors[tensor.name] = float(np.max(larger[moved] / smaller[moved], initial=1.0))
    return factors
