"""lm_eval asks a server: the same tasks, few-shot examples and seeds, whichever server it is.

lm_eval 0.4.13 runs as a process of its own, with its own Python if need be. It only warns where it
cannot save what it found (loggers/evaluation_tracker.py:326 and :415), so its exit code says
nothing: what it wrote is read again before it is published. What it was answered it keeps beside
the output, so that a run that was cut off goes on.
"""

import asyncio
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibration.server_client import KEY_VARIABLE, Patience, ServerClient
from ...quantize.files.result_cache import resumable_folder
from ...quantize.files.staging import check_output
from ...recipes.decode import AT_LEAST_0, AT_LEAST_1
from ...recipes.errors import OutputError, ParityError
from ...recipes.packages import install_line
from ...recipes.strict_json import parse_object
from ..measure.engine_protocol import get_protocol
from ..measure.measurement import EngineName
from .lm_eval_samples import TaskSamples, missing_samples, read_samples

DEFAULT_COMMAND = "lm_eval"
_CACHE, _FOUND = "answers", "found"
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """What lm_eval is asked to do.

    Attributes:
        model: the name that the server has for it; None = whatever it says.
        tokenizer: folder; None with `chat`, where the server has the template.
        tasks: by lm_eval's names. include_path: folder with tasks of one's own.
        chat: messages to /v1/chat/completions instead of text to /v1/completions.
        num_fewshot: examples in the prompt; None = the task's own number.
        limit: items per task; None = all.
        seed: of few-shot examples and of draws.
        gen_kwargs: how to generate, as "KEY=VALUE,..."; None = as the task says.
        concurrency: requests in flight. max_retries: of each request.
        timeout: seconds of a request. max_length: tokens of prompt and answer.
        unsafe_code: tasks may run the code that the model writes.
    """

    server: str
    model: str | None
    tokenizer: Path | None
    tasks: tuple[str, ...]
    include_path: Path | None = None
    chat: bool = False
    num_fewshot: int | None = None
    limit: int | None = None
    seed: int = 1234
    gen_kwargs: str | None = None
    concurrency: int = 8
    max_retries: int = 5
    timeout: int = 600
    max_length: int = 4096
    unsafe_code: bool = False

    def check(self) -> None:
        """Refuse, before anything runs, what is out of range or missing."""
        numbers = {
            "--concurrency": self.concurrency,
            "--max-retries": self.max_retries,
            "--timeout": self.timeout,
            "--max-length": self.max_length,
            "--limit": 1 if self.limit is None else self.limit,
        }
        for option, number in numbers.items():
            AT_LEAST_1.check(ParityError, option, number, fix="leave it out")
        own = "leave it out for the task's own"
        AT_LEAST_0.check(ParityError, "--num-fewshot", self.num_fewshot, fix=own)
        if not self.server.startswith(("http://", "https://")):
            raise ParityError("--server", f"expected an address, got {self.server}",
                              fix="give http://HOST:PORT")  # fmt: skip
        if not self.tasks or not all(self.tasks):
            raise ParityError("--tasks", "expected names with commas between",
                              fix="such as gsm8k,humaneval")  # fmt: skip
        if self.tokenizer is None and not self.chat:
            raise ParityError("--tokenizer", "is needed to make prompts of text",
                              fix="give the target's folder, or --chat")  # fmt: skip
        folders = {"--tokenizer": self.tokenizer, "--include-path": self.include_path}
        for option, path in folders.items():
            if path is not None and not path.is_dir():
                raise ParityError(option, f"{path} is no folder", fix="give a local folder")

    def arguments(self, output: Path, cache: Path) -> list[str]:
        """The command line of lm_eval, without its own name."""
        address = "chat/completions" if self.chat else "completions"
        model: dict[str, object] = {
            "model": self.model,
            "base_url": f"{self.server.rstrip('/').removesuffix('/v1')}/v1/{address}",
            "num_concurrent": self.concurrency,
            "max_retries": self.max_retries,
            "timeout": self.timeout,
            "max_length": self.max_length,
            "seed": self.seed,
        }
        if self.tokenizer is not None:
            # By default lm_eval would ask the server for a tokenizer, if it has one to offer.
            model["tokenizer"] = str(self.tokenizer.absolute())
            model["tokenizer_backend"] = "huggingface"
        kind = "local-chat-completions" if self.chat else "local-completions"
        return [
            "run",
            *("--model", kind),
            *("--model_args", json.dumps(model)),
            *("--tasks", ",".join(self.tasks)),
            *("--seed", str(self.seed)),
            *("--batch_size", "1"),  # vLLM tells metrics of speculation for single prompts only
            *("--output_path", str(output)),
            *("--use_cache", str(cache)),
            "--log_samples",
            *(["--apply_chat_template"] if self.chat else []),
            *_given("--num_fewshot", self.num_fewshot),
            *_given("--limit", self.limit),
            *_given("--gen_kwargs", self.gen_kwargs),
            *_given("--include_path", self.include_path and self.include_path.absolute()),
            *(["--confirm_run_unsafe_code"] if self.unsafe_code else []),
        ]


def run_tasks(
    asked: TaskRun, out: Path, *, engine: EngineName, command: str = DEFAULT_COMMAND
) -> dict[str, TaskSamples]:
    """Run lm_eval against a server; `command` is its name, a path, or "PYTHON -m lm_eval".

    Beside `out`, until it is done, lies OUT.tasks with all answers so far: the same call goes on
    with them. ParityError: lm_eval is not installed, fails, or did not save every sample.
    """
    asked.check()
    check_output(out)
    words = _found_command(command)
    asked = dataclasses.replace(asked, model=_served_model(asked, engine))
    work = out.with_name(f"{out.name}.tasks")
    with resumable_folder(work, "tasks", _plan(asked)):
        found = work / _FOUND
        shutil.rmtree(found, ignore_errors=True)  # of a run that was cut off while it wrote
        _run([*words, *asked.arguments(found, work / _CACHE)])
        samples = _checked(found)
        check_output(out)
        try:
            found.rename(out)
        except OSError as exc:
            raise OutputError(out, f"cannot be written: {exc}",
                              fix=f"move {found} there") from exc  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)
    return {task: _moved(one, found, out) for task, one in samples.items()}


_MAY_CHANGE = ("concurrency", "max_retries", "timeout")
"""What a run that goes on may be told otherwise: it changes no answer."""


def _plan(asked: TaskRun) -> dict[str, Any]:
    """What another run may not go on with; as JSON reads it again."""
    fields = dataclasses.asdict(asked)
    kept = {key: value for key, value in fields.items() if key not in _MAY_CHANGE}
    return dict(parse_object(json.dumps(kept, default=str)))


def _served_model(asked: TaskRun, engine: EngineName) -> str:

    async def identified() -> str:
        key = os.environ.get(KEY_VARIABLE) or None
        patience = Patience(attempts=3, seconds=asked.timeout)
        async with ServerClient(
            asked.server, key=key, most_in_flight=1, patience=patience
        ) as client:
            identity, _ = await get_protocol(engine).identify(client)
        return identity.model

    model = asyncio.run(identified())
    if asked.model not in (None, model):
        raise ParityError("--model", f"expected a server of {asked.model}, got one of {model}",
                          fix="give the server of that model, or its name")  # fmt: skip
    return model


def _given(option: str, value: object) -> Sequence[str]:
    return [] if value is None else [option, str(value)]


def _found_command(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ParityError("--lm-eval", f"cannot be read as a command: {exc}",
                          fix="quote it as a shell does") from exc  # fmt: skip
    if not words or shutil.which(words[0]) is None:
        raise ParityError(
            "--lm-eval",
            f"there is no program {command!r}",
            fix=f"{install_line('tasks')}; or in another environment, with transformers, and give"
            " its path: --lm-eval VENV/bin/lm_eval",
        )
    return words


def _run(words: Sequence[str]) -> None:
    """Its output goes to stderr, as progress does."""
    ended = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=_STDERR, env=_environment(), check=False
    )
    if ended.returncode:
        raise ParityError(
            words[0],
            f"lm_eval ended with exit code {ended.returncode}",
            fix="see its messages above; the same command continues with the answers so far",
        )


def _environment() -> Mapping[str, str]:
    """lm_eval's name for the key of a server is OpenAI's."""
    key = os.environ.get(KEY_VARIABLE)
    return {**os.environ, **({"OPENAI_API_KEY": key} if key else {})}


def _checked(found: Path) -> dict[str, TaskSamples]:
    problem = "it is not there"
    if found.is_dir():
        samples = read_samples(found)
        problem = missing_samples(found, samples)
        if not problem:
            return samples
    raise ParityError(
        found,
        f"lm_eval did not save all that it found: {problem}",
        fix="see its messages above; the same command continues with the answers so far",
    )


def _moved(one: TaskSamples, before: Path, after: Path) -> TaskSamples:
    return dataclasses.replace(one, path=after / one.path.relative_to(before))
