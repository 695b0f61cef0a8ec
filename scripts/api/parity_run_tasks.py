"""`parity_run_tasks`: let lm_eval ask a server, for `parity_tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from ...validate.measure.measurement import EngineName
from . import reports
from .arguments import AnyPath, OutFolder
from .option import Option
from .references import optional_path
from .settings import Settings
from .verb import verb


@dataclass(frozen=True, slots=True)
class RunTasksSettings(Settings):
    """Which tasks, of which server, into which folder."""

    server: Annotated[str, Option("address of the server, http://HOST:PORT", "URL")]
    engine: Annotated[
        EngineName, Option("engine that runs on the server; it is verified before lm_eval starts")
    ]
    tasks: Annotated[
        Sequence[str],
        Option("tasks by their lm_eval names, such as gsm8k", "TASK,...", several="commas"),
    ]
    out: OutFolder
    _: KW_ONLY
    model: Annotated[
        str | None,
        Option("the server's name of the target (default: the server is asked)", "NAME"),
    ] = None
    tokenizer: Annotated[AnyPath | None, Option("folder of the target's tokenizer", "FOLDER")] = (
        None
    )
    chat: Annotated[bool, Option("send messages; the server applies its chat template")] = False
    include_path: Annotated[
        AnyPath | None, Option("folder with task definitions of your own", "FOLDER")
    ] = None
    num_fewshot: Annotated[
        int | None, Option("few-shot examples in each prompt (default: the task's own)", "EXAMPLES")
    ] = None
    limit: Annotated[int | None, Option("items per task (default: all)", "ITEMS")] = None
    seed: Annotated[
        int, Option("seed of few-shot examples and of sampling (default 1234)", "SEED")
    ] = 1234
    concurrency: Annotated[int, Option("concurrent requests (default 8)", "REQUESTS")] = 8
    max_retries: Annotated[int, Option("retries of each request (default 5)", "ATTEMPTS")] = 5
    timeout: Annotated[int, Option("timeout of a request in seconds (default 600)", "SECONDS")] = (
        600
    )
    max_length: Annotated[
        int, Option("longest prompt and answer together, in tokens (default 4096)", "TOKENS")
    ] = 4096
    gen_kwargs: Annotated[
        str | None,
        Option("generation arguments for lm_eval (default: the task's own)", "KEY=VALUE,..."),
    ] = None
    confirm_run_unsafe_code: Annotated[
        bool,
        Option("allow tasks such as humaneval to run code that the model wrote, on this machine"),
    ] = False
    lm_eval: Annotated[
        str, Option("command that starts lm_eval, in any environment (default lm_eval)", "COMMAND")
    ] = "lm_eval"


@verb(RunTasksSettings)
def parity_run_tasks(settings: RunTasksSettings) -> "Mapping[str, reports.TaskSamples]":
    """Run tasks of lm_eval against a server, and keep the samples for `parity_tasks`.

    Returns:
        Task -> the samples that lm_eval wrote.

    Raises:
        DraftQuantError: the server is not the expected one, or lm_eval fails; the error quotes
            lm_eval's own text.
    """
    from ...validate.parity.run_tasks import TaskRun, run_tasks

    asked = TaskRun(
        server=settings.server,
        model=settings.model,
        tokenizer=optional_path(settings.tokenizer),
        tasks=tuple(settings.tasks),
        include_path=optional_path(settings.include_path),
        chat=settings.chat,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        seed=settings.seed,
        gen_kwargs=settings.gen_kwargs,
        concurrency=settings.concurrency,
        max_retries=settings.max_retries,
        timeout=settings.timeout,
        max_length=settings.max_length,
        unsafe_code=settings.confirm_run_unsafe_code,
    )
    return run_tasks(asked, Path(settings.out), engine=settings.engine, command=settings.lm_eval)
