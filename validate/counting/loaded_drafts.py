"""Drafts that run along traces, loaded within the memory that there is."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...calibration.passes.memory import MemoryEstimate, estimate_replay, resolve_device
from ...calibration.passes.on_traces import shared_tables
from ...calibration.traces.target_tables import SharedTables
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.stored.loading import LoadedDraft, load_draft
from ...recipes.regular_file import optional_path
from .acceptance_counts import Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedForReplay:
    """Drafts that fit in memory beside what their passes need, and how they are to be run.

    Attributes:
        drafts: the reference first. folders: of each.
        tables: of the target, for drafts without their own.
        max_tokens: of a batch, see `batches_of`.
    """

    drafts: list[LoadedDraft]
    folders: Sequence[Path]
    traces: TraceFolder
    tables: SharedTables
    device: torch.device
    max_tokens: int

    @property
    def both(self) -> tuple[LoadedDraft, LoadedDraft]:
        """Baseline and candidate of a gate, the first two."""
        baseline, candidate, *_ = self.drafts
        return baseline, candidate


def load_for_replay(folders: Sequence[Path], traces: TraceFolder, how: Passes) -> LoadedForReplay:
    """Say what memory a replay takes, refuse what does not fit, and load the drafts.

    Args:
        folders: the reference draft first.

    Raises:
        DeviceError: there is no such device, or too little memory.
        CheckpointError, VerifyError: see `load_draft`.
    """
    estimate = memory_of(folders, traces, how)
    estimate.check()
    how.listener.note(estimate.line())
    empty = LoadedForReplay(
        drafts=[],
        folders=(),
        traces=traces,
        tables=shared_tables(traces, optional_path(how.target), estimate.device),
        device=estimate.device,
        max_tokens=estimate.max_tokens,
    )
    return load_beside(empty, folders, how)


def memory_of(
    folders: Sequence[Path], traces: TraceFolder, how: Passes, *, in_turn: bool = False
) -> MemoryEstimate:
    """What a replay of drafts will take; `in_turn`: see `estimate_replay`."""
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
    """What was loaded, and these drafts after it, which share the first one's equal tensors."""
    drafts = list(loaded.drafts)
    forms = how.served_forms(len(drafts) + len(folders))[len(drafts) :]
    for folder, form in zip(folders, forms, strict=True):
        draft = load_draft(
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
        drafts.append(draft)
    return dataclasses.replace(loaded, drafts=drafts, folders=(*loaded.folders, *folders))
