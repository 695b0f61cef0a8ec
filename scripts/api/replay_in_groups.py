"""Replay of any number of drafts: in groups that fit in memory, each beside the first draft.

What the first draft proposes is computed once, or recalled, for all groups.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .loaded_drafts import load_beside, load_for_replay, memory_of
from .references import Reference, folder_of
from .replay import OnTracesSettings, note_memory, replay_beside, replay_cache, replay_loaded

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.draft_replay import DraftReplay

MOST_TOGETHER = 8
"""Drafts that share one reading of the traces beside the first; more would save no more time."""


def replay_in_groups(
    references: Sequence[Reference], traces: "TraceFolder", settings: OnTracesSettings
) -> "tuple[DraftReplay, ...]":
    """Replay drafts, each exactly as `replay` does beside the first.

    Args:
        references: folders or Hub ids, the first one first.
        traces: to replay.
        settings: how.

    Raises:
        DeviceError: the first draft and one other do not fit in memory together.
        DraftQuantError: see `replay`.
    """
    from ...validate.counting.replay_cache import HeldProposals

    settings = _alike(references, settings)
    estimate = memory_of(references, traces, settings, in_turn=True)
    groups = estimate.groups(MOST_TOGETHER)
    if len(groups) <= 1:
        return replay_loaded(load_for_replay(references, traces, settings), settings)
    estimate.in_turn.check()
    listener, names = settings.listener, [one.name for one in estimate.drafts]
    listener.note(
        f"{len(names)} drafts in {len(groups)} groups of at most {max(map(len, groups))}, each"
        f" beside {names[0]}; at most {estimate.in_turn.line()}"
    )
    first = dataclasses.replace(
        load_for_replay(references[:1], traces, settings), max_tokens=estimate.max_tokens
    )
    held = HeldProposals(beneath=replay_cache(listener, no_cache=settings.no_cache))
    replays: list[DraftReplay] = []
    for group in groups:
        listener.note(f"replay of drafts {group.start} to {group.stop - 1} of {len(names) - 1}")
        loaded = load_beside(first, references[group.start : group.stop], settings)
        baseline, *others = replay_beside(loaded, settings, held)
        replays += others if replays else [baseline, *others]
    note_memory(listener, first.device)
    return tuple(replays)


def _alike(references: Sequence[Reference], settings: OnTracesSettings) -> OnTracesSettings:
    """The settings with which all groups run the same prompts together.

    A draft that rounds its inputs under one scale of a whole call gets one prompt at a time, and so
    do all drafts that it is compared with, also those of other groups.
    """
    from ...quantize.files.checkpoint import Checkpoint
    from ...quantize.stored.stored_draft import StoredDraft

    stored = (StoredDraft.read(Checkpoint.open(folder_of(one))) for one in references)
    if all(one.rounds_alone for one in stored):
        return settings
    return dataclasses.replace(settings, batch_size=1)
