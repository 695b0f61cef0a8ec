"""Opening what several verbs ask for: a draft, a recipe, a draft that runs along traces."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...quantize.drafts import Draft, read_draft
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.lints import check_vocabulary_map
from ...recipes import Recipe, load_recipe, recipe_of_alias
from ...recipes.errors import RecipeError
from ...recipes.refused import named_algorithm, refusal
from ...recipes.schema import BackendName
from .watch import SILENT, Watch

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft

Reference = str | Path
"""A draft: its folder, or its id on the Hub (owner/name, owner/name@revision)."""


def open_draft(reference: Reference, subtree: str | None = None) -> tuple[DraftSource, Draft]:
    """Resolve a folder or Hub id and read its headers and vocabulary map."""
    source = resolve_draft(str(reference), subtree)
    draft = read_draft(source.checkpoint())
    check_vocabulary_map(draft)
    return source, draft


def folder_of(reference: Reference) -> Path:
    """Where a draft lies; see `resolve_draft`."""
    return resolve_draft(str(reference)).folder


def chosen_recipe(
    recipe: Recipe | Reference,
    *,
    backend: BackendName | None = None,
    algorithm: str | None = None,
    watch: Watch = SILENT,
) -> Recipe:
    """A recipe with another backend or algorithm than its own, where one is named.

    Args:
        recipe: a built-in name, a file, or a resolved recipe.
        backend: who computes the codes.
        algorithm: one of `ALGORITHMS`, computed by torch unless `backend` says otherwise.
        watch: is told which recipe an alias is.

    Raises:
        RecipeError: the recipe is wrong, or its backend does not run the algorithm.
    """
    chosen = named_recipe(recipe, watch)
    if algorithm:
        chosen = with_algorithm(chosen, algorithm, backend or "torch")
    elif backend:
        chosen = dataclasses.replace(chosen, backend=backend)
    refused = refusal(chosen.backend, chosen.algorithm)
    if refused is not None:
        where = f"recipe {chosen.name}: backend {chosen.backend}, {chosen.algorithm}"
        raise RecipeError(where, refused.reason, fix=refused.fix)
    return chosen


def named_recipe(reference: Recipe | Reference, watch: Watch = SILENT) -> Recipe:
    """A recipe by name, alias or file, or itself; of an alias it is said which one that is.

    Raises:
        RecipeError: see `load_recipe`.
    """
    if isinstance(reference, Recipe):
        return reference
    recipe = load_recipe(str(reference))
    if recipe_of_alias(str(reference)):
        watch.note(f"recipe {reference} is {recipe.name}: {recipe.summary}")
    return recipe


def with_algorithm(recipe: Recipe, name: str, backend: BackendName = "torch") -> Recipe:
    """A recipe by what the command line calls `name`, computed by a backend.

    Raises:
        RecipeError: the backend does not run it, or no algorithm has this name.
    """
    scale, rounding = named_algorithm(name, backend)
    algorithm = dataclasses.replace(recipe.algorithm, scale=scale, rounding=rounding)
    return dataclasses.replace(recipe, algorithm=algorithm, backend=backend)


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
) -> DraftOnTraces:
    """Load a draft with the tables that it shares, onto a device."""
    from ...calibration.passes.devices import resolve_device
    from ...quantize.stored.loading import load_draft
    from ...validate.counting.trace_replay import chosen_num_draft_tokens

    where = resolve_device(device)
    shared = shared_tables(traces, target, where)
    draft = load_draft(folder, device=where, compact=True, shared=shared)
    return DraftOnTraces(draft, shared, chosen_num_draft_tokens(num_draft_tokens, [draft]))


def optional_path(path: str | os.PathLike[str] | None) -> Path | None:
    """A path, where one is given."""
    return None if path is None else Path(path)
