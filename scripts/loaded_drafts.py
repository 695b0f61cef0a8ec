"""Drafts that run along traces: how they run, and loading them within the memory there is."""

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..quantize.files.hub import Reference, folder_of
from ..recipes.formats import AS_STORED, ServedForm
from ..recipes.regular_file import optional_path
from .frame import arguments
from .frame.settings import Settings

if TYPE_CHECKING:
    import torch

    from ..calibration.passes.memory import MemoryEstimate
    from ..calibration.traces.target_tables import SharedTables
    from ..calibration.traces.trace_folder import TraceFolder
    from ..quantize.stored.loading import LoadedDraft


@dataclass(frozen=True)
class PassesSettings(Settings):
    """How drafts run along traces."""

    _: KW_ONLY
    num_draft_tokens: arguments.NumDraftTokens = None
    target: arguments.Target = None
    device: arguments.Device = "auto"
    dtype: arguments.Dtype = "float32"
    draft_sampling: arguments.Sampling = "greedy"
    batch_size: arguments.BatchSize = None

    @property
    def rotary_base(self) -> float | None:
        """Instead of that of config.json."""
        return None

    def served_forms(self, count: int) -> list[ServedForm]:
        """What an engine makes of each of so many drafts."""
        return [AS_STORED] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedForReplay:
    """Drafts that fit in memory beside what their passes need, and how they are to be run.

    Attributes:
        drafts: the reference first. folders: of each.
        tables: of the target, for drafts without their own.
        max_tokens: see `replay_drafts`.
    """

    drafts: "list[LoadedDraft]"
    folders: Sequence[Path]
    traces: "TraceFolder"
    tables: "SharedTables"
    device: "torch.device"
    max_tokens: int

    @property
    def both(self) -> "tuple[LoadedDraft, LoadedDraft]":
        """Baseline and candidate of a gate, the first two."""
        baseline, candidate, *_ = self.drafts
        return baseline, candidate


def load_for_replay(
    references: Sequence[Reference],
    traces: "TraceFolder",
    settings: PassesSettings,
) -> LoadedForReplay:
    """Say what memory a replay takes, refuse what does not fit, and load the drafts.

    Args:
        references: folders or Hub ids, the reference draft first.
        traces: to replay.
        settings: how; its listener is told what that takes.

    Raises:
        DeviceError: there is no such device, or too little memory.
        CheckpointError, VerifyError: see `load_draft`.
    """
    from ..calibration.passes.memory import resolve_device
    from ..calibration.passes.on_traces import shared_tables

    estimate = memory_of(references, traces, settings)
    estimate.check()
    settings.listener.note(estimate.line())
    device = resolve_device(settings.device)
    empty = LoadedForReplay(
        drafts=[],
        folders=(),
        traces=traces,
        tables=shared_tables(traces, optional_path(settings.target), device),
        device=device,
        max_tokens=estimate.max_tokens,
    )
    return load_beside(empty, references, settings)


def memory_of(
    references: Sequence[Reference],
    traces: "TraceFolder",
    settings: PassesSettings,
    *,
    in_turn: bool = False,
) -> "MemoryEstimate":
    """What a replay of drafts will take; `in_turn`: see `estimate_replay`."""
    import torch

    from ..calibration.passes.memory import estimate_replay, resolve_device

    return estimate_replay(
        [folder_of(reference) for reference in references],
        traces,
        dtype=getattr(torch, settings.dtype),
        device=resolve_device(settings.device),
        num_draft_tokens=settings.num_draft_tokens,
        batch_size=settings.batch_size,
        online_heads=[form.online_head for form in settings.served_forms(len(references))],
        in_turn=in_turn,
    )


def load_beside(
    loaded: LoadedForReplay, references: Sequence[Reference], settings: PassesSettings
) -> LoadedForReplay:
    """What was loaded, and these drafts behind it, which share the first one's equal tensors."""
    import torch

    from ..quantize.stored.loading import load_draft

    drafts, folders = list(loaded.drafts), [folder_of(reference) for reference in references]
    forms = settings.served_forms(len(drafts) + len(folders))[len(drafts) :]
    for folder, form in zip(folders, forms, strict=True):
        draft = load_draft(
            folder,
            dtype=getattr(torch, settings.dtype),
            device=loaded.device,
            compact=True,
            like=drafts[0] if drafts else None,
            shared=loaded.tables,
            rope_theta=settings.rotary_base,
            online_head=form.online_head,
            kv_cache=form.kv_cache,
        )
        drafts.append(draft)
    return dataclasses.replace(loaded, drafts=drafts, folders=(*loaded.folders, *folders))
