"""Replay whose batches of prompts tasks of a Ray cluster compute, in place of this process."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...calibration.passes.proposals import Proposals
from ...calibration.passes.ray_tasks import check_equal, ray_tasks
from ...calibration.traces.trace_folder import TraceFolder
from ...recipes.listener import SILENT
from .acceptance_counts import Passes
from .loaded_drafts import LoadedForReplay, load_for_replay
from .replay_cache import Elsewhere, Question, decoded, encoded


def replayed_on_ray(
    address: str,
    loaded: LoadedForReplay,
    how_asked: Passes,
    on_progress: Callable[[int, int], None],
) -> Elsewhere:
    """What drafts propose, by a task for each batch of prompts.

    Args:
        address: of the cluster.
        loaded: the drafts.
        how_asked: with which they were loaded.
        on_progress: called with (prompts that are done, prompts).
    """

    def answer(asked: Sequence[Question]) -> Sequence[Sequence[Proposals]]:
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
        found: list[dict[int, Proposals]] = [{} for _ in asked]
        batches = asked[0].batches
        with ray_tasks(address, loaded.device, open_) as placed:
            for batch, answers in zip(batches, placed(batches), strict=True):
                for own, question, answer in zip(found, asked, answers, strict=True):
                    proposals = decoded(answer, question, batch)
                    assert proposals is not None  # the worker was asked the same question
                    own.update(zip(batch, proposals, strict=True))
                on_progress(len(found[0]), len(loaded.traces))
        return [[own[position] for position in sorted(own)] for own in found]

    return answer


@contextmanager
def _open_replay(
    how_asked: Passes,
    folders: Sequence[Path],
    traces: Path,
    how: Mapping[str, Any],
    contents: Mapping[int, Mapping[str, object]],
) -> Iterator[Callable[[Sequence[int]], list[bytes]]]:
    """In a worker: load the drafts, and ask some of them; a job is a batch of positions."""
    loaded = load_for_replay(folders, TraceFolder.open(traces), how_asked)
    questions = [Question(draft=loaded.drafts[i], traces=loaded.traces, **how) for i in contents]
    for question, content in zip(questions, contents.values(), strict=True):
        check_equal(question.draft.name, question.content, content)
    yield lambda batch: [encoded(question.answer(batch)) for question in questions]
