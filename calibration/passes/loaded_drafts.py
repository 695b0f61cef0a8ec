"""Drafts that run along traces, loaded within the available memory."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...quantize.stored.loading import LoadedDraft, load_draft
from ..traces.target_tables import SharedTables
from ..traces.trace_folder import TraceFolder
from . import Passes
from .devices import resolve_device
from .memory import MemoryEstimate, estimate_replay
from .on_traces import shared_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedForReplay:
    """Drafts that fit in memory, the reference first, and how many tokens a batch may have.

    `tables` are the target's, for drafts without their own.
    """

    drafts: list[LoadedDraft]
    folders: Sequence[Path]
    traces: TraceFolder
    tables: SharedTables
    device: torch.device
    max_tokens: int

    @property
    def both(self) -> tuple[LoadedDraft, LoadedDraft]:
        """Baseline and candidate of a gate: the first two."""
        baseline, candidate, *_ = self.drafts
        return baseline, candidate


def load_for_replay(folders: Sequence[Path], traces: TraceFolder, how: Passes) -> LoadedForReplay:
    """Print the memory that a replay takes, and load the drafts; DeviceError if they do not fit."""
    estimate = memory_of(folders, traces, how)
    estimate.check()
    how.listener.note(estimate.line())
    empty = LoadedForReplay(
        drafts=[],
        folders=(),
        traces=traces,
        tables=shared_tables(traces, how.target, estimate.device),
        device=estimate.device,
        max_tokens=estimate.max_tokens,
    )
    return load_beside(empty, folders, how)


def memory_of(
    folders: Sequence[Path], traces: TraceFolder, how: Passes, *, in_turn: bool = False
) -> MemoryEstimate:
    """What a replay of drafts will take."""
    return estimate_replay(
        folders,
        traces,
        dtype=getattr(torch, how.dtype),
        device=resolve_device(how.device),
        num_draft_tokens=how.num_draft_tokens,
        batch_size=how.batch_size,
        online_heads=[form.online_head for form in how.served_forms(len(folders))],
        in_turn=in_turn,
    )


def load_beside(loaded: LoadedForReplay, folders: Sequence[Path], how: Passes) -> LoadedForReplay:
    """The loaded drafts, and these after them, which share equal tensors with the first."""
    drafts = list(loaded.drafts)
    forms = how.served_forms(len(drafts) + len(folders))[len(drafts) :]
    for folder, form in zip(folders, forms, strict=True):
        drafts.append(
            load_draft(
                folder,
                dtype=getattr(torch, how.dtype),
                device=loaded.device,
                compact=True,
                like=drafts[0] if drafts else None,
                shared=loaded.tables,
                rope_theta=how.rotary_base,
                online_head=form.online_head,
                kv_cache=form.kv_cache,
            )
        )
    return dataclasses.replace(loaded, drafts=drafts, folders=(*loaded.folders, *folders))
