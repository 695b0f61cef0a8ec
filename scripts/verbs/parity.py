"""`draftquant parity`: what speculation, or quantizing, changes of what is said."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ...recipes.decode import AT_LEAST_1
from ...recipes.regular_file import AnyPath, optional_path
from ...validate.measure.measurement import EngineName
from ...validate.runs.parity_asked import DivergenceRun, DraftParityRun, SampledRun, TasksRun
from ..frame import reports
from ..frame.arguments import (
    BOUNDED_FINDINGS,
    CHOSEN_PROMPTS,
    FINDINGS,
    Device,
    Dtype,
    NumDraftTokens,
    OutFolder,
    Target,
    share,
)
from ..frame.console import print_table, stdout, table
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import Command, verb
from .gate import COLOURS

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding, Findings

_DIRECTION = "of metrics whose direction neither lm_eval's results nor their name says"


@dataclass(frozen=True)
class DivergenceSettings(Settings, DivergenceRun):
    """Of which measurements, and what is noise."""

    options: ClassVar = {
        **FINDINGS,
        "plain": Argument(
            "measurement without a draft, at temperature 0, with --top-logprobs 2", "PLAIN"
        ),
        "speculative": Argument(
            "measurements of the same prompts with drafts: BF16, quantized", "SPECULATIVE"
        ),
        "plain_again": Option(
            "a second measurement of PLAIN at another concurrency; it shows the numeric noise",
            "MEASUREMENT",
        ),
        "max_gap": Option(
            "largest gap in nats between the target's two most likely tokens at which"
            " a difference counts as noise (default 0.25, or twice what --plain-again"
            " shows, at most 0.5)",
            "NATS",
        ),
        "max_hazard_ratio": Option(
            "how many times as often as --plain-again the speculative output may differ from PLAIN",
            "RATIO",
        ),
        "min_prompts": Option(
            "smallest number of distinct prompts for a pass (default 30)", "PROMPTS"
        ),
    }


@verb(DivergenceSettings)
def parity_divergence(settings: DivergenceSettings) -> "reports.Findings":
    """Compare the greedy output of a target with a draft and without, up to the first difference.

    Returns:
        One finding for each speculative measurement.

    Raises:
        DraftQuantError: the measurements cannot be read, or do not have the same prompts.
    """
    from ...validate.runs.parity_runs import divergence_found

    return divergence_found(settings)


@dataclass(frozen=True)
class DraftParitySettings(Settings, DraftParityRun):
    """Of which drafts along which traces, and how far they may part."""

    options: ClassVar = {
        **BOUNDED_FINDINGS,
        "baseline": Argument("the BF16 draft: a folder or a Hub id", "BF16"),
        "candidate": Argument("the quantized draft: a folder or a Hub id", "QUANT"),
        "traces": Option("trace folder", "TRACES"),
        "num_draft_tokens": NumDraftTokens,
        "target": Target,
        "device": Device,
        "dtype": Dtype,
        "top": Option(
            "how many most likely tokens are compared as a set (default 5)",
            "TOKENS",
            bounds=AT_LEAST_1,
        ),
        "max_kl": Option("largest mean KL(BF16 || QUANT) per drafted token, in nats", "NATS"),
        "min_agreement": Option(
            "smallest share of drafted tokens with the same most likely token", "SHARE"
        ),
        "min_top_agreement": Option(
            "smallest shared part of the --top most likely tokens", "SHARE"
        ),
        "min_overlap": Option(
            "smallest mean overlap of the two distributions (sum of the smaller probabilities)",
            "SHARE",
        ),
        "max_right_drop": Option(
            "how much less often the most likely token may equal the target's", "SHARE"
        ),
        "max_perplexity_rise": Option(
            "largest relative rise of the draft's perplexity on the target's tokens (0.01 is 1 %%)",
            "SHARE",
        ),
        "max_alpha_drop": Option(
            "largest drop of the expected acceptance of sampled proposals (for sampled traces)",
            "SHARE",
        ),
    }


@verb(DraftParitySettings)
def parity_draft(settings: DraftParitySettings) -> "reports.Findings":
    """Compare the proposals of a quantized draft with those of the BF16 draft, at each draft step.

    Returns:
        One finding for each figure, with its parts by draft step and by category.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, or they do not fit each other.
    """
    from ...validate.runs.parity_runs import draft_found

    return draft_found(settings)


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
    from ...validate.parity.lm_eval_tasks import TaskRun, run_tasks

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


@dataclass(frozen=True)
class SampledSettings(Settings, SampledRun):
    """Of which measurements, and who says how likely they are."""

    options: ClassVar = {
        **BOUNDED_FINDINGS,
        **CHOSEN_PROMPTS,
        "plain": Argument("measurement without a draft, with a --temperature", "PLAIN"),
        "speculative": Argument("the same measurement with a draft", "SPECULATIVE"),
        "prompts": Option("prompts that both were measured with", "PROMPTS"),
        "tokenizer": Option(
            "folder of the tokenizer, for prompts that are text (default: --target)", "FOLDER"
        ),
        "target": Option("folder of the target, if transformers computes the scores", "TARGET"),
        "score_server": Option(
            "address of a server that runs the target without a draft, if it computes the scores",
            "URL",
        ),
        "score_engine": Option("engine at --score-server (default: that of PLAIN)"),
        "device": Device,
        "dtype": Option("dtype that --target computes in (default float32)"),
        "concurrency": Option(
            "concurrent requests at --score-server (default 8)", "REQUESTS", bounds=AT_LEAST_1
        ),
        "max_logprob_drop": Option(
            "largest difference of the mean log-probability per token, in nats, in "
            "either direction",
            "NATS",
        ),
        "exclusive": ClassVar,
    }
    exclusive: ClassVar = (("target", "score_server"),)


@verb(SampledSettings)
def parity_sampled(settings: SampledSettings) -> "reports.Findings":
    """Compare how likely sampled output is to the target, with a draft and without.

    Returns:
        One finding.

    Raises:
        DraftQuantError: the measurements do not fit each other, or no target is given that can
            score them.
    """
    from ...validate.runs.parity_runs import sampled_found

    return sampled_found(settings)


@dataclass(frozen=True)
class TasksSettings(Settings, TasksRun):
    """Of which samples, and what drop is too much."""

    options: ClassVar = {
        **BOUNDED_FINDINGS,
        "first": Argument(
            "samples of the reference server: a folder of lm_eval's --log_samples, or"
            " one of its files",
            "A_SAMPLES",
        ),
        "second": Argument("samples of the other server", "B_SAMPLES"),
        "max_score_drop": Option(
            "largest tolerated drop of the score, in the metric's own unit, such as "
            "0.01 or 1%% for accuracy",
            "MARGIN",
            reads=share,
        ),
        "higher_is_better": Option(_DIRECTION, "METRIC"),
        "lower_is_better": Option(_DIRECTION, "METRIC"),
    }


@verb(TasksSettings)
def parity_tasks(settings: TasksSettings) -> "reports.Findings":
    """Compare the scores that two servers got for the same items of lm_eval.

    Returns:
        One finding for each metric of each task.

    Raises:
        DraftQuantError: the samples cannot be read, or do not hold the same items.
    """
    from ...validate.runs.parity_runs import tasks_found

    return tasks_found(settings)


def _show_tasks(found: "Findings", _settings: object) -> None:
    for one in found.findings:
        _print_scores(one)
    _show(found, _settings)


def _show_draft(found: "Findings", _settings: object) -> None:
    _print_parts(found.findings)
    _show(found, _settings)


Samples = Mapping[str, "reports.TaskSamples"]


def _items(samples: Samples, _settings: object) -> dict[str, Any]:
    return {
        task: {
            "samples": str(one.path),
            "items": {name: len(items) for name, items in one.items.items()},
        }
        for task, one in samples.items()
    }


def _show_items(samples: Samples, _settings: object) -> None:
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")


def _mapping(found: "Findings", _settings: object) -> Any:
    from ...validate.parity.finding import to_mapping

    return to_mapping(found.findings)


def _show(found: "Findings", _settings: object) -> None:
    numbers = ("figure", "lower bound", "upper bound", "threshold")
    rows = table("Parity", "check", "of", *numbers, "verdict", right=numbers)
    for one in found.findings:
        rows.row(
            one.check,
            one.what,
            *(_number(x) for x in (one.estimate, one.lower, one.upper, one.threshold)),
            one.verdict,
            style=COLOURS[one.verdict],
        )
    print_table(rows)
    for one in found.findings:
        stdout().line((one.verdict, f"bold {COLOURS[one.verdict]}"), f": {one.what}: {one.reason}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _print_scores(one: "Finding") -> None:
    found = one.details[0]
    counts = ""
    if "mcnemar_p" in found:
        counts = (
            f"; only A right {found['only_first_right']}, only B right"
            f" {found['only_second_right']}, McNemar p = {found['mcnemar_p']:.3f}"
        )
    stdout().line(
        f"{one.what}: A {found['first']:.4f}, B {found['second']:.4f}"
        f" over {found['items']:,} items{counts}"
    )


def _print_parts(findings: "Sequence[Finding]") -> None:
    """By draft step and by category."""
    figures = [one.what for one in findings]
    found = table("By step and category", "of", *figures, right=(*figures,))
    parts = [(key, row[key]) for key in ("step", "category") for row in findings[0].details
             if key in row]  # fmt: skip
    for key, part in parts:
        cells = []
        for one in findings:
            own = [row["estimate"] for row in one.details if row.get(key) == part]
            cells.append(f"{own[0]:.5f}" if own else "")
        found.row(f"{key} {part}", *cells)
    print_table(found)


COMMANDS = {
    "divergence": Command(
        parity_divergence,
        _show,
        _mapping,
        summary="compare greedy output with a draft to output without one",
    ),
    "tasks": Command(
        parity_tasks,
        _show_tasks,
        _mapping,
        summary="compare the lm_eval scores of two servers on the same items",
    ),
    "run-tasks": Command(
        parity_run_tasks,
        _show_items,
        _items,
        summary="run lm_eval tasks on a server, for 'parity tasks'",
    ),
    "sampled": Command(
        parity_sampled,
        _show,
        _mapping,
        summary="compare how likely sampled output is to the target, with and without a draft",
    ),
    "draft": Command(
        parity_draft,
        _show_draft,
        _mapping,
        summary="compare the proposals of a quantized draft to those of the BF16 one",
    ),
}
