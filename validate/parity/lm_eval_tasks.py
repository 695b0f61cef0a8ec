"""Tasks by lm_eval, which asks a server.

lm_eval only warns where it cannot save its results (loggers/evaluation_tracker.py:326 and :415 of
0.4.13): its files are read again before they are published.
"""

import asyncio
import dataclasses
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...calibration.server_client import KEY_VARIABLE, Patience, ServerClient
from ...quantize.files.result_cache import resumable_folder
from ...quantize.files.staging import check_output
from ...recipes.errors import OutputError, ParityError
from ...recipes.installing import install_line
from ..measure.server_answers import get_protocol
from .task_run import TaskRun
from .task_samples import TaskSamples, missing_samples, read_samples

_CACHE, _FOUND = "answers", "found"
_STDERR = 2
_GOES_ON = "see its messages above; the same command continues with the answers so far"


def run_tasks(asked: TaskRun) -> dict[str, TaskSamples]:
    """Run lm_eval, or resume what OUT.tasks keeps."""
    asked.check()
    out = Path(asked.out)
    check_output(out)
    words = _found_command(asked.lm_eval)
    asked = dataclasses.replace(asked, model=_served_model(asked))
    work = out.with_name(f"{out.name}.tasks")
    with resumable_folder(work, "tasks", asked.plan):
        folder = work / _FOUND
        shutil.rmtree(folder, ignore_errors=True)  # from a run that was interrupted while it wrote
        _run([*words, *asked.arguments(folder, work / _CACHE)])
        samples = _checked(folder)
        check_output(out)
        try:
            folder.rename(out)
        except OSError as exc:
            raise OutputError(out, f"cannot be written: {exc}",
                              fix=f"move {folder} there") from exc  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)
    return {
        task: dataclasses.replace(task_samples, path=out / task_samples.path.relative_to(folder))
        for task, task_samples in samples.items()
    }


def _served_model(asked: TaskRun) -> str:
    async def identified() -> str:
        key = os.environ.get(KEY_VARIABLE) or None
        patience = Patience(attempts=3, seconds=asked.timeout)
        async with ServerClient(
            asked.server, key=key, most_in_flight=1, patience=patience
        ) as client:
            identity, _ = await get_protocol(asked.engine).identify(client)
        return identity.model

    model = asyncio.run(identified())
    if asked.model not in (None, model):
        raise ParityError("--model", f"expected a server of {asked.model}, got one of {model}",
                          fix="give the server of that model, or its name")  # fmt: skip
    return model


def _found_command(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ParityError(
            "--lm-eval",
            f"cannot be read as a command: {exc}",
            fix="quote it as a shell does",
        ) from exc
    if not words or shutil.which(words[0]) is None:
        raise ParityError(
            "--lm-eval",
            f"there is no program {command!r}",
            fix=f"{install_line('tasks')}; or in another environment, with transformers, and give"
            " its path: --lm-eval VENV/bin/lm_eval",
        )
    return words


def _run(words: Sequence[str]) -> None:
    """Its output goes to stderr, like progress; its variable for the key is OpenAI's."""
    key = os.environ.get(KEY_VARIABLE)
    named = {**os.environ, **({"OPENAI_API_KEY": key} if key else {})}
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=_STDERR, env=named, check=False)
    if ended.returncode:
        what = f"lm_eval ended with exit code {ended.returncode}"
        raise ParityError(words[0], what, fix=_GOES_ON)


def _checked(saved: Path) -> dict[str, TaskSamples]:
    samples = read_samples(saved) if saved.is_dir() else {}
    problem = missing_samples(saved, samples) if saved.is_dir() else "it is not there"
    if problem:
        raise ParityError(saved, f"lm_eval did not save all that it found: {problem}", fix=_GOES_ON)
    return samples
