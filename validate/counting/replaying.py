"""Replay of drafts as asked: loaded in the available memory, from the cache or on a cluster."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...calibration.passes import OnTraces, Passes
from ...calibration.passes.devices import peak_bytes
from ...calibration.passes.loaded_drafts import (
    LoadedForReplay,
    load_beside,
    load_for_replay,
    memory_of,
)
from ...calibration.passes.on_traces import chosen_num_draft_tokens
from ...calibration.passes.proposals import Proposals
from ...calibration.passes.ray_tasks import check_equal, ray_tasks
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.result_cache import user_cache
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes.listener import SILENT, Listener, Progress
from .draft_counts import DraftReplay
from .replay_cache import Elsewhere, ReplayCache, ReplayQuestion, decoded, encoded
from .trace_replay import replay_drafts

MOST_TOGETHER = 8
"""Drafts that share one reading of the traces with the first; more would save no more time."""


def replay_loaded(loaded: LoadedForReplay, how: OnTraces) -> tuple[DraftReplay, ...]:
    """Replay, and then report the memory that it took."""
    replays = _beside(loaded, how, _cache(how, holds=False))
    _note_memory(how.listener, loaded.device)
    return replays


def replay_in_groups(
    folders: Sequence[Path], traces: TraceFolder, how: OnTraces
) -> tuple[DraftReplay, ...]:
    """Replay any number of drafts, in groups that fit in memory beside the first one.

    What the first draft proposes is computed, or recalled, once for all groups.
    """
    how = _alike(folders, how)
    estimate = memory_of(folders, traces, how, in_turn=True)
    groups = estimate.groups(MOST_TOGETHER)
    if len(groups) <= 1:
        return replay_loaded(load_for_replay(folders, traces, how), how)
    estimate.in_turn.check()
    listener, names = how.listener, [draft.name for draft in estimate.drafts]
    listener.note(
        f"{len(names)} drafts in {len(groups)} groups of at most {max(map(len, groups))}, each"
        f" beside {names[0]}; at most {estimate.in_turn.line()}"
    )
    first = dataclasses.replace(
        load_for_replay(folders[:1], traces, how), max_tokens=estimate.max_tokens
    )
    held = _cache(how, holds=True)
    replays: tuple[DraftReplay, ...] = ()
    for group in groups:
        listener.note(f"replay of drafts {group.start} to {group.stop - 1} of {len(names) - 1}")
        loaded = load_beside(first, folders[group.start : group.stop], how)
        baseline, *others = _beside(loaded, how, held)
        replays += tuple(others) if replays else (baseline, *others)
    _note_memory(listener, first.device)
    return replays


def _alike(folders: Sequence[Path], how: OnTraces) -> OnTraces:
    """One prompt at a time for all groups if a draft uses one input scale for a whole call."""
    stored = (StoredDraft.read(Checkpoint.open(folder)) for folder in folders)
    if all(draft.rounds_alone for draft in stored):
        return how
    return dataclasses.replace(how, batch_size=1)


def _beside(loaded: LoadedForReplay, how: OnTraces, cache: ReplayCache) -> tuple[DraftReplay, ...]:
    """Replay drafts; the first one's proposals are looked up in `cache` and kept there."""
    address = how.ray_address
    with ExitStack() as shown:
        bar = shown.enter_context(how.listener.bar("replay", len(loaded.traces), "work"))

        def moved(done: int, total: int) -> None:
            bar.set(done, total)
            if done >= total:  # the traces' own checks are not work of drafts
                shown.close()

        return replay_drafts(
            loaded.drafts,
            loaded.traces,
            num_draft_tokens=chosen_num_draft_tokens(how.num_draft_tokens, loaded.drafts),
            draft_sampling=how.draft_sampling,
            batch_size=how.batch_size,
            max_tokens=loaded.max_tokens,
            cache=cache,
            elsewhere=replayed_on_ray(address, loaded, how, bar.set) if address else None,
            on_progress=moved,
        )


def _note_memory(listener: Listener, device: torch.device) -> None:
    held = peak_bytes(device) / 1e9
    kind = "of this process" if device.type == "cpu" else f"on {device}"
    listener.note(f"memory {kind}: {held:.2f} GB at its peak")


def _cache(how: OnTraces, *, holds: bool) -> ReplayCache:
    results = None if how.no_cache else user_cache(how.listener.warning)
    return ReplayCache(results=results, on_note=how.listener.note, holds=holds)


def replayed_on_ray(
    address: str, loaded: LoadedForReplay, how_asked: Passes, on_progress: Progress
) -> Elsewhere:
    """What drafts propose, computed by one task for each batch of prompts."""

    def answer(asked: Sequence[ReplayQuestion]) -> Sequence[Sequence[Proposals]]:
        if not asked:
            return []
        names = {each.name for each in dataclasses.fields(asked[0])} - {"draft", "traces"}
        places = {id(draft): place for place, draft in enumerate(loaded.drafts)}
        device, target = loaded.device.type, how_asked.target and Path(how_asked.target).absolute()
        open_ = partial(
            _open_replay,
            dataclasses.replace(how_asked, listener=SILENT, device=device, target=target),
            [folder.absolute() for folder in loaded.folders],
            loaded.traces.folder.absolute(),
            {name: getattr(asked[0], name) for name in names},
            {places[id(question.draft)]: question.content for question in asked},
        )
        by_draft: list[dict[int, Proposals]] = [{} for _ in asked]
        batches = asked[0].batches
        with ray_tasks(address, loaded.device, open_) as placed:
            for batch, answers in zip(batches, placed(batches), strict=True):
                for answered, question, answer in zip(by_draft, asked, answers, strict=True):
                    proposals = decoded(answer, question, batch)
                    assert proposals is not None  # the worker was asked the same question
                    answered.update(zip(batch, proposals, strict=True))
                on_progress(len(by_draft[0]), len(loaded.traces))
        return [[answered[position] for position in sorted(answered)] for answered in by_draft]

    return answer


@contextmanager
def _open_replay(
    how_asked: Passes,
    folders: Sequence[Path],
    traces: Path,
    how: Mapping[str, Any],
    contents: Mapping[int, Mapping[str, object]],
) -> Iterator[Callable[[Sequence[int]], list[bytes]]]:
    """In a worker: load the drafts, and query some of them; a job is a batch of positions."""
    loaded = load_for_replay(folders, TraceFolder.open(traces), how_asked)
    questions = [
        ReplayQuestion(draft=loaded.drafts[i], traces=loaded.traces, **how) for i in contents
    ]
    for question, content in zip(questions, contents.values(), strict=True):
        check_equal(question.draft.name, question.content, content)
    yield lambda batch: [encoded(question.answer(batch)) for question in questions]
