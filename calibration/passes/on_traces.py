"""What runs along traces: traces that are opened, and a draft with the tables that it shares."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ...quantize.drafts.geometry import usual_draft_tokens
from ...quantize.stored.loading import LoadedDraft, load_draft
from ...recipes.decode import AT_LEAST_1
from ...recipes.errors import ReplayError
from ...recipes.listener import Listener
from ..traces.target_tables import SharedTables, TargetTables
from ..traces.trace_folder import TraceFolder
from .memory import resolve_device


def open_traces(folder: str | os.PathLike[str], listener: Listener) -> TraceFolder:
    """Open a trace folder; where its hidden states are not stored as they are, say how."""
    traces, warnings = open_with_warnings(folder, listener)
    for warning in warnings:
        listener.warning(warning)
    return traces


def open_with_warnings(
    folder: str | os.PathLike[str], listener: Listener
) -> tuple[TraceFolder, tuple[str, ...]]:
    """The same for a verb whose report holds the warnings.

    Rounded hidden states are one: every figure is then that of a draft with rounded inputs.
    """
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


def chosen_num_draft_tokens(asked: int | None, drafts: Sequence[LoadedDraft]) -> int:
    """K: as asked, else what all the drafts are made for.

    A block draft fills its whole block; a chain has no length of its own, 3 is what is usually
    served.

    Raises:
        ReplayError: less than 1 is asked, or nothing, and the drafts differ.
    """
    if asked is not None:
        served = "give the K that will be served, such as -k 3"
        AT_LEAST_1.check(ReplayError, "--num-draft-tokens", asked, fix=served)
        return asked
    defaults = [usual_draft_tokens(draft.geometry) for draft in drafts]
    if len(set(defaults)) > 1:
        named = ", ".join(f"{d.name} {k}" for d, k in zip(drafts, defaults, strict=True))
        raise ReplayError(
            "--num-draft-tokens",
            f"the drafts propose different numbers of tokens: {named}",
            fix="give one number for all: -k K",
        )
    return defaults[0]


def shared_tables(traces: TraceFolder, target: Path | None, device: torch.device) -> SharedTables:
    """Embedding and head for drafts without, as they are stored: the target's, else the traces'."""
    if target:
        return TargetTables.find(target).shared(None, device)
    return traces.tables(None, device)


def draft_on_traces(
    folder: Path,
    traces: TraceFolder,
    *,
    device: str = "auto",
    target: Path | None = None,
    num_draft_tokens: int | None = None,
    subtree: str | None = None,
) -> tuple[LoadedDraft, int]:
    """A draft, or a layer of a target, loaded with the tables that it shares; and K."""
    where = resolve_device(device)
    shared = shared_tables(traces, target, where)
    draft = load_draft(folder, device=where, compact=True, shared=shared, subtree=subtree)
    return draft, chosen_num_draft_tokens(num_draft_tokens, [draft])
