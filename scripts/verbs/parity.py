"""`draftquant parity`: prints what speculation, or quantizing, changes of what is said."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.hub import Reference
from ...recipes.decode import AT_LEAST_1
from ...recipes.regular_file import AnyPath, optional_path
from ...validate.measure.measurement import EngineName
from ..frame import reports
from ..frame.arguments import Device, Dtype, NumDraftTokens, OutFolder, Target, share
from ..frame.console import print_json, print_table, stdout, table
from ..frame.findings import BoundedFindings, FindingsFile
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import Below, Verbs, run_verb, verb
from ..loaded_drafts import load_for_replay
from ..parity_sampled import parity_sampled
from .gate import COLOURS
from .measure import draft_identity
from .replay import OnTracesSettings

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding, Findings

# ---- `parity_divergence`: greedy output with a draft against output without one


@dataclass(frozen=True, slots=True)
class DivergenceSettings(FindingsFile):
    """Of which measurements, and what is noise."""

    plain: Annotated[
        AnyPath,
        Argument("measurement without a draft, at temperature 0, with --top-logprobs 2", "PLAIN"),
    ]
    speculative: Annotated[
        Sequence[AnyPath],
        Argument("measurements of the same prompts with drafts: BF16, quantized", "SPECULATIVE"),
    ]
    _: KW_ONLY
    plain_again: Annotated[
        AnyPath | None,
        Option("a second measurement of PLAIN at another concurrency; it shows the "
        "numeric noise",
               "MEASUREMENT"),
    ] = None  # fmt: skip
    max_gap: Annotated[
        float | None,
        Option(
            "largest gap in nats between the target's two most likely tokens at which"
            " a difference counts as noise (default 0.25, or twice what --plain-again"
            " shows, at most 0.5)",
            "NATS",
        ),
    ] = None
    max_hazard_ratio: Annotated[
        float | None,
        Option(
            "how many times as often as --plain-again the speculative output may differ from PLAIN",
            "RATIO",
        ),
    ] = None
    min_prompts: Annotated[
        int | None,
        Option("smallest number of distinct prompts for a pass (default 30)", "PROMPTS"),
    ] = None


@verb(DivergenceSettings)
def parity_divergence(settings: DivergenceSettings) -> "reports.Findings":
    """Compare the greedy output of a target with a draft and without, up to the first difference.

    Returns:
        One finding for each speculative measurement.

    Raises:
        DraftQuantError: the measurements cannot be read, or do not have the same prompts.
    """
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.divergence_findings import MIN_PROMPTS, divergence_findings
    from ...validate.served.served_gate import draft_sha256

    again, fewest = settings.plain_again, settings.min_prompts
    speculative = [read_measurement(Path(path)) for path in settings.speculative]
    findings = divergence_findings(
        read_measurement(Path(settings.plain)),
        speculative,
        plain_again=None if again is None else read_measurement(Path(again)),
        max_gap=settings.max_gap,
        max_hazard_ratio=settings.max_hazard_ratio,
        min_prompts=MIN_PROMPTS if fewest is None else fewest,
    )
    return settings.write(findings, lambda: [draft_sha256(one) for one in speculative])


# ---- `parity_draft`: proposals of a quantized draft against those of BF16


@dataclass(frozen=True, slots=True)
class DraftParitySettings(BoundedFindings):
    """Of which drafts along which traces, and how far they may part."""

    baseline: Annotated[Reference, Argument("the BF16 draft: a folder or a Hub id", "BF16")]
    candidate: Annotated[Reference, Argument("the quantized draft: a folder or a Hub id", "QUANT")]
    traces: Annotated[AnyPath, Option("trace folder", "TRACES")]
    _: KW_ONLY
    num_draft_tokens: NumDraftTokens = None
    target: Target = None
    device: Device = "auto"
    dtype: Dtype = "float32"
    top: Annotated[
        int,
        Option(
            "how many most likely tokens are compared as a set (default 5)",
            "TOKENS",
            bounds=AT_LEAST_1,
        ),
    ] = 5
    max_kl: Annotated[
        float | None, Option("largest mean KL(BF16 || QUANT) per drafted token, in nats", "NATS")
    ] = None
    min_agreement: Annotated[
        float | None,
        Option("smallest share of drafted tokens with the same most likely token", "SHARE"),
    ] = None
    min_top_agreement: Annotated[
        float | None, Option("smallest shared part of the --top most likely tokens", "SHARE")
    ] = None
    min_overlap: Annotated[
        float | None,
        Option(
            "smallest mean overlap of the two distributions (sum of the smaller probabilities)",
            "SHARE",
        ),
    ] = None
    max_right_drop: Annotated[
        float | None,
        Option("how much less often the most likely token may equal the target's", "SHARE"),
    ] = None
    max_perplexity_rise: Annotated[
        float | None,
        Option(
            "largest relative rise of the draft's perplexity on the target's tokens (0.01 is 1 %%)",
            "SHARE",
        ),
    ] = None
    max_alpha_drop: Annotated[
        float | None,
        Option(
            "largest drop of the expected acceptance of sampled proposals (for sampled traces)",
            "SHARE",
        ),
    ] = None


@verb(DraftParitySettings)
def parity_draft(settings: DraftParitySettings) -> "reports.Findings":
    """Compare the proposals of a quantized draft with those of the BF16 draft, at each draft step.

    Returns:
        One finding for each figure, with its parts by draft step and by category.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, or they do not fit each other.
    """
    from ...calibration.passes.on_traces import chosen_num_draft_tokens, open_traces
    from ...validate.parity.draft_findings import (
        DraftLimits,
        check_limits,
        draft_agreement,
        draft_findings,
    )

    allowed = DraftLimits(
        max_kl=settings.max_kl,
        min_agreement=settings.min_agreement,
        min_top_agreement=settings.min_top_agreement,
        min_overlap=settings.min_overlap,
        max_right_drop=settings.max_right_drop,
        max_perplexity_rise=settings.max_perplexity_rise,
        max_alpha_drop=settings.max_alpha_drop,
    )
    check_limits(allowed)
    traces = open_traces(settings.traces, settings.listener)
    how = OnTracesSettings(
        listener=settings.listener,
        num_draft_tokens=settings.num_draft_tokens,
        target=settings.target,
        device=settings.device,
        dtype=settings.dtype,
        batch_size=1,
    )
    loaded = load_for_replay([settings.baseline, settings.candidate], traces, how)
    with settings.listener.bar("compare", len(traces), "work") as bar:
        prompts = draft_agreement(
            *loaded.both,
            traces,
            num_draft_tokens=chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts),
            top=settings.top,
            on_progress=bar.set,
        )
    findings = draft_findings(prompts, allowed, top=settings.top, confidence=settings.confidence)
    both = (settings.baseline, settings.candidate)
    return settings.write(findings, lambda: [draft_identity(one).draft_sha256 for one in both])


# ---- `parity_run_tasks`: let lm_eval ask a server, for `parity_tasks`


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


# ---- `parity_tasks`: scores that lm_eval gave the same items of two servers

_DIRECTION = "of metrics whose direction neither lm_eval's results nor their name says"


@dataclass(frozen=True, slots=True)
class TasksSettings(BoundedFindings):
    """Of which samples, and what drop is too much."""

    first: Annotated[
        AnyPath,
        Argument(
            "samples of the reference server: a folder of lm_eval's --log_samples, or"
            " one of its files",
            "A_SAMPLES",
        ),
    ]
    second: Annotated[AnyPath, Argument("samples of the other server", "B_SAMPLES")]
    _: KW_ONLY
    max_score_drop: Annotated[
        float | None,
        Option(
            "largest tolerated drop of the score, in the metric's own unit, such as "
            "0.01 or 1%% for accuracy",
            "MARGIN",
            reads=share,
        ),
    ] = None
    higher_is_better: Annotated[Sequence[str], Option(_DIRECTION, "METRIC")] = ()
    lower_is_better: Annotated[Sequence[str], Option(_DIRECTION, "METRIC")] = ()


@verb(TasksSettings)
def parity_tasks(settings: TasksSettings) -> "reports.Findings":
    """Compare the scores that two servers got for the same items of lm_eval.

    Returns:
        One finding for each metric of each task.

    Raises:
        DraftQuantError: the samples cannot be read, or do not hold the same items.
    """
    from ...validate.parity.lm_eval_tasks import Directions, read_samples
    from ...validate.parity.task_findings import task_findings

    findings = task_findings(
        read_samples(Path(settings.first)),
        read_samples(Path(settings.second)),
        max_score_drop=settings.max_score_drop,
        confidence=settings.confidence,
        directions=Directions(higher=settings.higher_is_better, lower=settings.lower_is_better),
    )
    return settings.write(findings)


def run(options: argparse.Namespace) -> int:
    """Run the verb; the exit code is that of the worst finding."""
    return run_verb(options, VERBS)


def _divergence(options: argparse.Namespace) -> int:
    return _show(parity_divergence.run(options.settings), as_json=options.json)


def _sampled(options: argparse.Namespace) -> int:
    return _show(parity_sampled.run(options.settings), as_json=options.json)


def _tasks(options: argparse.Namespace) -> int:
    found = parity_tasks.run(options.settings)
    if not options.json:
        for one in found.findings:
            _print_scores(one)
    return _show(found, as_json=options.json)


def _draft(options: argparse.Namespace) -> int:
    found = parity_draft.run(options.settings)
    if not options.json:
        _print_parts(found.findings)
    return _show(found, as_json=options.json)


def _run_tasks(options: argparse.Namespace) -> int:
    samples = parity_run_tasks.run(options.settings)
    if options.json:
        print_json({task: {"samples": str(one.path), "items": {name: len(items) for name, items
                    in one.items.items()}} for task, one in samples.items()})  # fmt: skip
        return 0
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")
    return 0


VERBS: Verbs = {
    "divergence": Below(
        parity_divergence, _divergence, "compare greedy output with a draft to output without one"
    ),
    "tasks": Below(
        parity_tasks, _tasks, "compare the lm_eval scores of two servers on the same items"
    ),
    "run-tasks": Below(
        parity_run_tasks, _run_tasks, "run lm_eval tasks on a server, for 'parity tasks'"
    ),
    "sampled": Below(
        parity_sampled,
        _sampled,
        "compare how likely sampled output is to the target, with and without a draft",
    ),
    "draft": Below(
        parity_draft, _draft, "compare the proposals of a quantized draft to those of the BF16 one"
    ),
}


def _show(found: "Findings", *, as_json: bool) -> int:
    """Print findings, and give the exit code of the worst verdict."""
    from ...validate.parity.finding import to_mapping

    if as_json:
        print_json(to_mapping(found.findings))
    else:
        _print(found)
    return found.exit_code


def _print(found: "Findings") -> None:
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
