"""The steps of an acceptance that compare what drafts and servers say: proposals, texts, scores."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import accept_found as found
from .accept_inputs import BF16, PLAIN, QUANTIZED, Given, hash_of
from .accept_step import Step, carried_out
from .parity_divergence import DivergenceSettings, parity_divergence
from .parity_draft import DraftParitySettings, parity_draft
from .parity_run_tasks import RunTasksSettings, parity_run_tasks
from .parity_tasks import TasksSettings, parity_tasks

PARITY = ("parity-draft.json", "parity-texts.json", "parity-tasks.json")
_TASKS = ("tasks-bf16", "tasks-quantized")


def parity_draft_step(given: Given, traces: Path) -> Step:
    """The proposals of both drafts on traces."""
    settings = given.settings

    def run(path: Path) -> None:
        asked = DraftParitySettings(
            baseline=settings.draft,
            candidate=settings.quantized,
            traces=traces,
            num_draft_tokens=settings.num_draft_tokens,
            target=given.target,
            device=settings.device,
            dtype=settings.dtype,
            report=path,
            listener=settings.listener,
        )
        carried_out(parity_draft, asked)

    return Step(
        name="parity draft",
        what="what both drafts propose",
        output=PARITY[0],
        inputs=lambda: {**given.evidence(), **given.options("num_draft_tokens", "dtype")},
        run=run,
        found=partial(found.compared, "parity draft"),
    )


def parity_texts_step(given: Given) -> Step:
    """What both servers wrote, against what the target writes alone."""

    def run(path: Path) -> None:
        plain, bf16, quantized = (path.with_name(name) for name in (PLAIN, BF16, QUANTIZED))
        asked = DivergenceSettings(
            plain=plain,
            speculative=(bf16, quantized),
            report=path,
            listener=given.settings.listener,
        )
        carried_out(parity_divergence, asked)

    return Step(
        name="parity texts",
        what="the text of both servers, against that of the target alone",
        output=PARITY[1],
        inputs=lambda: {**given.evidence(), "plain measured": hash_of(given.folder / PLAIN)},
        run=run,
        found=partial(found.compared, "parity texts"),
    )


def parity_tasks_steps(given: Given) -> Iterator[Step]:
    """The tasks of each server, and their scores beside each other."""
    settings = given.settings
    names = ("tasks BF16", "tasks QUANT")
    assert settings.server is not None  # see `AcceptSettings.check`
    for name, output, url in zip(names, _TASKS, settings.server, strict=True):
        yield _run_tasks(given, name, output, url)

    def run(path: Path) -> None:
        first, second = (path.with_name(name) for name in _TASKS)
        asked = TasksSettings(
            first=first,
            second=second,
            max_score_drop=settings.max_score_drop,
            report=path,
            listener=settings.listener,
        )
        carried_out(parity_tasks, asked)

    yield Step(
        name="parity tasks",
        what="the scores of both servers",
        output=PARITY[2],
        inputs=lambda: {
            **{name: hash_of(given.folder / name) for name in _TASKS},
            **given.options("max_score_drop"),
        },
        run=run,
        found=partial(found.compared, "parity tasks"),
    )


def _run_tasks(given: Given, name: str, output: str, url: str) -> Step:
    settings = given.settings

    def run(path: Path) -> None:
        assert settings.engine is not None  # see `AcceptSettings.check`
        asked = RunTasksSettings(
            server=url,
            engine=settings.engine,
            tasks=settings.tasks,
            out=path,
            tokenizer=given.target,
            listener=settings.listener,
        )
        carried_out(parity_run_tasks, asked)

    return Step(
        name=name,
        what=f"{', '.join(settings.tasks)} by {url}",
        output=output,
        inputs=lambda: {
            **given.drafts(),
            "--target": given.target_sha256,
            **given.options("engine", "tasks"),
        },
        run=run,
        found=partial(found.answered, name),
    )
