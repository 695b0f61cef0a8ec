"""Opening what several verbs ask for: a draft, a recipe, a draft that runs along traces."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...quantize.files.hub import DraftSource, Reference, resolve_draft
from ...recipes import Recipe, load_recipe, recipe_of_alias, to_mapping
from ...recipes.decode import walk
from ...recipes.errors import RecipeError
from ...recipes.formats import FP8_CACHE, KvCacheFormat, KvCacheScales
from ...recipes.library import calibrated, merged
from ...recipes.listener import SILENT, Listener
from ...recipes.regular_file import AnyPath
from ...recipes.schema import CORRECTED, BackendName, InputCorrection
from ...recipes.schemes import named_algorithm, refusal
from .arguments import AnyRecipe
from .settings import of_value

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.drafts import Draft
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.measure.measuring import DraftIdentity


def open_draft(
    reference: Reference, subtree: str | None = None, listener: Listener = SILENT
) -> "tuple[DraftSource, Draft]":
    """Resolve a folder or Hub id and read its headers and vocabulary map."""
    from ...quantize.drafts import read_draft
    from ...quantize.lints import check_vocabulary_map

    source = resolve_draft(str(reference), subtree)
    draft = read_draft(source.checkpoint())
    check_vocabulary_map(draft)
    warn_of_a_target(draft, listener)
    return source, draft


def warn_of_a_target(draft: "Draft", listener: Listener) -> None:
    """A whole language model may be a draft of its own kind, or the target by mistake."""
    if not draft.family.is_whole_model:
        return
    size = sum(row.tensor.nbytes for row in draft.rows) / 1e9
    listener.warning(
        f"{draft.checkpoint.folder.name} is a whole language model ({size:.2f} GB,"
        f" {draft.geometry.num_layers} layers): right if a server drafts with it, beside a larger"
        " target; if it is the target itself, give the folder of its draft instead"
    )


def chosen_recipe(
    recipe: AnyRecipe,
    *,
    backend: BackendName | None = None,
    algorithm: str | None = None,
    input_correction: InputCorrection | None = None,
    kv_cache: KvCacheScales | None = None,
    listener: Listener = SILENT,
) -> Recipe:
    """A recipe with another backend or algorithm than its own, where one is named.

    Args:
        recipe: a built-in name, a file, a resolved recipe, or one as a dict.
        backend: who computes the codes.
        algorithm: one of `ALGORITHMS`, computed by torch unless `backend` says otherwise.
        input_correction: in place of the algorithm's own.
        kv_cache: scales of an FP8 KV cache, whatever the recipe says of one.
        listener: is told which recipe an alias is.

    Raises:
        RecipeError: the recipe is wrong, or its backend does not run the algorithm.
    """
    chosen = named_recipe(recipe, listener)
    if algorithm:
        chosen = with_algorithm(chosen, algorithm, backend or "torch")
    elif backend:
        chosen = dataclasses.replace(chosen, backend=backend)
    if input_correction:
        chosen = _with_input_correction(chosen, input_correction)
    if kv_cache:
        cache = KvCacheFormat(dtype=FP8_CACHE, scales=kv_cache)
        chosen = dataclasses.replace(chosen, kv_cache=cache)
    refused = refusal(chosen.backend, chosen.algorithm)
    if refused is not None:
        where = f"recipe {chosen.name}: backend {chosen.backend}, {chosen.algorithm}"
        raise RecipeError(where, refused.reason, fix=refused.fix)
    return chosen


def named_recipe(reference: AnyRecipe, listener: Listener = SILENT) -> Recipe:
    """A recipe by name, alias, file or keys, or itself; the listener is told which one an alias is.

    Raises:
        RecipeError: see `load_recipe`.
    """
    if isinstance(reference, Recipe):
        return reference
    if isinstance(reference, Mapping):
        return recipe_of_keys(reference)
    recipe = load_recipe(str(reference))
    if recipe_of_alias(str(reference)):
        better = calibrated(recipe.name)
        advice = f"; if the gate says INCONCLUSIVE: {better}, with --traces" if better else ""
        listener.note(f"recipe {reference} is {recipe.name}: {recipe.summary}{advice}")
    return recipe


def recipe_of_keys(keys: Mapping[str, Any]) -> Recipe:
    """A recipe as a dict with the keys of a recipe file, held to the same rules.

    Args:
        keys: as in a file, `extends` too; each list may be a list or a tuple.

    Raises:
        RecipeError: every key that is unknown, missing or of another kind, by its path.
    """
    own = dict(keys)
    if "extends" in own:
        base = to_mapping(load_recipe(str(own.pop("extends"))))
        own = merged({key: base[key] for key in base if key != "name"}, own)
    recipe, misfits = walk(Recipe, of_value(own))
    if misfits:
        said = [(f"recipe, {one.key or 'as a whole'}", one.what, one.fix) for one in misfits]
        (where, what, fix), *others = said
        more = [f"{at}: {problem}" for at, problem, _ in others]
        raise RecipeError(where, what, fix=fix or "see recipes/README.md", details=more)
    refused = refusal(recipe.backend, recipe.algorithm)
    if refused is not None:
        where = f"recipe, algorithm: backend {recipe.backend}, {recipe.algorithm}"
        raise RecipeError(where, refused.reason, fix=refused.fix)
    return typing.cast(Recipe, recipe)


def with_algorithm(recipe: Recipe, name: str, backend: BackendName = "torch") -> Recipe:
    """A recipe by what the command line calls `name`, computed by a backend.

    Raises:
        RecipeError: the backend does not run it, or no algorithm has this name.
    """
    scale, rounding = named_algorithm(name, backend)
    coarse = any(form.has_coarse_inputs for form in recipe.formats)
    corrects = coarse and rounding in CORRECTED and backend == "torch"
    algorithm = dataclasses.replace(
        recipe.algorithm,
        scale=scale,
        rounding=rounding,
        input_correction="auto" if corrects else "off",
        norms=recipe.algorithm.norms if rounding == "learned" else "kept",
    )
    return dataclasses.replace(recipe, algorithm=algorithm, backend=backend)


def _with_input_correction(recipe: Recipe, choice: InputCorrection) -> Recipe:
    algorithm = recipe.algorithm
    if choice == "auto" and algorithm.rounding not in CORRECTED:
        raise RecipeError(
            f"--input-correction auto, recipe {recipe.name}",
            f"rounding {algorithm.rounding} measures nothing of the inputs",
            fix="leave it out, or use --algorithm gptq or --algorithm learned",
        )
    algorithm = dataclasses.replace(algorithm, input_correction=choice)
    return dataclasses.replace(recipe, algorithm=algorithm)


def shared_tables(
    traces: "TraceFolder", target: Path | None, device: "torch.device"
) -> "SharedTables":
    """Embedding and head for drafts without: the target's if it is given, else the traces'.

    As they are stored, so that a draft that is loaded compact holds them so.
    """
    from ...calibration.traces.target_tables import TargetTables

    if target:
        return TargetTables.find(target).shared(None, device)
    return traces.tables(None, device)


class DraftOnTraces(NamedTuple):
    """A draft that is loaded to run along traces.

    Attributes:
        draft: unquantized, held as narrow as it is stored.
        shared: the target's tables that it may share.
        num_draft_tokens: K, as asked or its own.
    """

    draft: "LoadedDraft"
    shared: "SharedTables"
    num_draft_tokens: int


def draft_on_traces(
    folder: Path,
    traces: "TraceFolder",
    *,
    device: str = "auto",
    target: Path | None = None,
    num_draft_tokens: int | None = None,
    subtree: str | None = None,
) -> DraftOnTraces:
    """Load a draft, or with `subtree` a layer of a target, with the tables that it shares."""
    from ...calibration.passes.memory import resolve_device
    from ...quantize.stored.loading import load_draft
    from ...validate.counting.trace_replay import chosen_num_draft_tokens

    where = resolve_device(device)
    shared = shared_tables(traces, target, where)
    draft = load_draft(folder, device=where, compact=True, shared=shared, subtree=subtree)
    return DraftOnTraces(draft, shared, chosen_num_draft_tokens(num_draft_tokens, [draft]))


# ---- Traces that a verb computes on: opened, and said how their hidden states are stored


def open_traces(folder: AnyPath, listener: Listener) -> "TraceFolder":
    """Open a trace folder; where its hidden states are not stored as they are, say how.

    Raises:
        TraceError: it is no whole, consistent trace folder.
    """
    traces, warnings = open_with_warnings(folder, listener)
    for warning in warnings:
        listener.warning(warning)
    return traces


def open_with_warnings(
    folder: AnyPath, listener: Listener
) -> "tuple[TraceFolder, tuple[str, ...]]":
    """The same for a verb whose report holds the warnings.

    Rounded hidden states are one: every figure is then that of a draft with rounded inputs.
    """
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(Path(folder))
    storage = traces.manifest.features.storage
    warnings: tuple[str, ...] = ()
    if storage == "fp8-per-token":
        warnings = (
            f"the hidden states of {folder} were rounded to FP8, with a scale for each position:"
            " figures are those of a draft that reads rounded hidden states",
        )
    elif storage == "zstd":
        listener.note(f"the hidden states of {folder} are packed by zstd, without loss")
    return traces, warnings


# ---- Who a draft is that a server runs, or that counts are of: its name and its tensors' identity


def draft_identity(reference: Reference, served_as: str | None = None) -> "DraftIdentity":
    """A draft's identity, as the gate knows it, and what its server calls it."""
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.measure.measuring import DraftIdentity

    folder = DraftFolder.read(resolve_draft(str(reference)).folder)
    quantization = "of another tool" if folder.quantized else "none"
    if folder.quantized_by is not None:
        quantization = folder.quantized_by.recipe.name
    given = Path(reference)
    return DraftIdentity(
        draft=given.resolve().name if given.is_dir() else str(reference),
        draft_sha256=folder.sha256,
        draft_quantization=quantization,
        quantized=folder.quantized,
        folder=folder.folder,
        served_as=served_as,
    )
