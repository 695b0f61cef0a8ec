"""`quantize`: plan, write, verify, publish."""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.engines.plan_verdicts import nothing_loads, to_mapping, verdict_lines, verdicts_of
from ...quantize.files.card_text import CARD_FILE, is_ours, read_card
from ...quantize.files.hub import running_argv
from ...quantize.files.staging import check_output
from ...quantize.planning.quantization_plan import NOTHING_MEASURED, Measured, Plan, Step, make_plan
from ...recipes.decode import AT_LEAST_1, SHARE_OR_ALL
from ...recipes.regular_file import optional_path
from ..frame import arguments, reports
from ..frame.console import OnTerminal, megabytes, print_json, stderr, stdout
from ..frame.opening import chosen_recipe, draft_on_traces, open_draft, open_traces
from ..frame.settings import Option, Settings, SettingsError
from ..frame.verb import verb
from ..learning import learn

if TYPE_CHECKING:
    import torch

    from ...calibration.linear_inputs.plan_inputs import PlanInputs
    from ...quantize.drafts import Draft
    from ...quantize.files.hub import DraftSource
    from ...quantize.lints import Lint
    from ...recipes import Recipe
    from ...recipes.listener import Bar, Listener
    from ..frame.reports import QuantizeReport


@dataclass(frozen=True, slots=True)
class QuantizeSettings(Settings):
    """Of which draft, by which recipe, into which folder."""

    draft: arguments.Draft
    recipe: arguments.RecipeName
    out: arguments.OutFolder
    _: KW_ONLY
    subtree: arguments.Subtree = None
    backend: arguments.Backend = None
    algorithm: arguments.AlgorithmName = None
    input_correction: arguments.InputCorrectionChoice = None
    kv_cache: arguments.KvCacheScalesChoice = None
    target_layers: arguments.TargetLayers = None
    traces: Annotated[
        arguments.AnyPath | None,
        Option(
            "traces to calibrate on, for static activation scales and for algorithms "
            "that use the linears' inputs (GPTQ)",
            "TRACES",
        ),
    ] = None
    input_scale: Annotated[
        float | None, Option("use this static activation scale for all linears", "SCALE")
    ] = None
    num_draft_tokens: arguments.NumDraftTokens = None
    vocab_size: Annotated[
        int | None,
        Option(
            "cut the head's vocabulary first: keep so many rows, chosen by --traces as 'draftquant"
            " vocab' chooses them",
            "ROWS",
            bounds=AT_LEAST_1,
        ),
    ] = None
    vocab_coverage: Annotated[
        float | None,
        Option(
            "the same, but as many rows as cover this share of the tokens of held-out text, such as"
            " 99.5%%",
            "SHARE",
            reads=arguments.share,
            bounds=SHARE_OR_ALL,
            fix="for example 99.5%",
        ),
    ] = None
    precise: arguments.Precise = False
    device: arguments.Device = "auto"
    target: arguments.Target = None
    allow_zero_rows: arguments.AllowZeroRows = False
    fix_config: arguments.FixConfig = False

    exclusive = (("vocab_size", "vocab_coverage"),)

    @property
    def cuts_rows(self) -> bool:
        """Whether the head keeps fewer rows."""
        return self.vocab_size is not None or self.vocab_coverage is not None

    def check(self) -> None:
        """Refuse to choose rows by nothing."""
        if self.cuts_rows and self.traces is None:
            raise SettingsError(
                "--vocab-size" if self.vocab_coverage is None else "--vocab-coverage",
                "rows are chosen by what the target says in recorded traces, also where the recipe"
                " needs none, and there are none",
                fix="give traces of other prompts than the gate's: --traces TRACES",
            )


@verb(QuantizeSettings)
def quantize(settings: QuantizeSettings) -> "reports.QuantizeReport":
    """Quantize a draft into a new folder. The folder appears complete and verified, or not at all.

    Example:
        >>> report = dq.quantize("DRAFT", "int4-channel", "OUT")
        >>> report.verification.ok
        True
        >>> len(report.plan.quantized), report.plan.bytes_before > report.plan.bytes_after
        (7, True)

    Returns:
        The folder, the plan, what verification found, which engines load the result, lints of the
        source, how the vocabulary was cut, where that was asked for, and all warnings. Each warning
        is a Python warning (`DraftQuantWarning`) too.

    Raises:
        DraftQuantError: a stage failed: reading, planning, computing, writing or verifying. Nothing
            is left behind.
    """
    if settings.device not in ("auto", "cpu"):
        _device(settings.device)  # there is such a one
    source, opened = open_draft(settings.draft, settings.subtree, settings.listener)
    chosen = chosen_recipe(
        settings.recipe,
        backend=settings.backend,
        algorithm=settings.algorithm,
        input_correction=settings.input_correction,
        kv_cache=settings.kv_cache,
        listener=settings.listener,
    )
    with ExitStack() as stack:
        if settings.cuts_rows:
            source, opened = stack.enter_context(_cut(settings, source, chosen))
        return _quantized(settings, stack, source, opened, chosen)


def _cut(
    settings: QuantizeSettings, source: "DraftSource", recipe: "Recipe"
) -> "AbstractContextManager[tuple[DraftSource, Draft]]":
    """The draft with the rows that are asked for."""
    from ..cut_rows import RowsAsked, with_chosen_rows

    asked = RowsAsked(
        size=settings.vocab_size,
        coverage=settings.vocab_coverage,
        target=optional_path(settings.target),
        options="--vocab-",
    )
    return with_chosen_rows(
        source,
        recipe,
        Path(settings.out),
        asked,
        traces=Path(settings.traces or ""),
        target_layers=settings.target_layers,
        listener=settings.listener,
    )


def _quantized(
    settings: QuantizeSettings,
    stack: ExitStack,
    source: "DraftSource",
    opened: "Draft",
    chosen: "Recipe",
) -> "reports.QuantizeReport":
    """A draft by a recipe; what is kept on disk meanwhile goes when the stack is left."""
    from ...quantize.lints import find_lints
    from ...quantize.making.preparing import check_tables
    from ...quantize.making.quantize_draft import quantize_draft

    listener, fix_config = settings.listener, settings.fix_config
    own_target, folder = optional_path(settings.target), Path(settings.out)
    plan = make_plan(chosen, opened, target_layers=settings.target_layers)
    proven = check_tables(plan, own_target)
    verdicts, lints = verdicts_of(plan, fix_config=fix_config), tuple(find_lints(opened))
    if (problem := nothing_loads(plan, verdicts)) is not None:
        listener.warning(problem)
    check_output(folder, plan.draft.checkpoint.folder)  # before anything that takes long
    phases = Phases(plan, listener)
    measured = _Inputs(plan, settings).measured(stack, phases.measured)
    bar = phases.bar = stack.enter_context(listener.bar("check", None))
    report = quantize_draft(
        plan,
        folder,
        source=source,
        argv=running_argv(),
        measured=measured,
        allow_zero_rows=settings.allow_zero_rows,
        fix_config=fix_config,
        target=own_target,
        proven=proven,
        on_progress=phases.written,
        on_stage=phases.begin,
        on_verified=bar.set,
        device=partial(_device, settings.device),
    )
    if report.damping:
        listener.warning(raised_damping(report.damping))
    if left := lints_left(settings.draft, lints, fix_config=fix_config):
        listener.warning(left)
    return dataclasses.replace(report, loads=verdicts, lints=lints)


def _device(name: str) -> "torch.device":
    """The device of this name; torch is imported for it."""
    from ...calibration.passes.memory import resolve_device

    return resolve_device(name)


def raised_damping(damping: Mapping[str, float]) -> str:
    """Said where second moments had no factor with the damping that is usual."""
    name, most = max(damping.items(), key=lambda item: item[1])
    return (
        f"GPTQ: the second moments of the inputs of {len(damping)} linear(s) have no Cholesky"
        f" factor with 0.01 of their mean on the diagonal; more was added (up to {most:g}, {name}),"
        " so errors are made up for less there\n  calibrate on more prompts, or try --precise"
    )


def lints_left(draft: object, lints: "Sequence[Lint]", *, fix_config: bool) -> str | None:
    """Which warnings of the source's config.json stay in the output, and how they go."""
    left = [one for one in lints if one.level == "warning" and not (fix_config and one.fix)]
    if not left:
        return None
    text = f"lints: {', '.join(one.name for one in left)}; see 'draftquant inspect {draft}'"
    fixable = ", ".join(one.name for one in left if one.fix)
    return text + (f"\n  --fix-config corrects {fixable} in the output" if fixable else "")


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    """Where what a plan must know of inputs comes from."""

    plan: Plan
    settings: QuantizeSettings

    def measured(self, stack: ExitStack, measuring: "Callable[[int, int], None]") -> Measured:
        """What `quantize_draft` takes; where nothing is given, nothing is imported."""
        if self.settings.traces is None and self.settings.input_scale is None:
            return NOTHING_MEASURED
        return self.found(stack, measuring).measured

    def found(self, stack: ExitStack, measuring: "Callable[[int, int], None]") -> "PlanInputs":
        """What the recipe needs, or what the algorithm does; there until the stack is left."""
        from ...calibration.linear_inputs.plan_inputs import (
            PlanInputs,
            few_for_correction,
            measured_inputs,
            need_of,
            why_unused,
        )
        from ...calibration.linear_inputs.static_scales import constant_scales
        from ...calibration.measured_cache import measure_cache_scales
        from ...calibration.traces.trace_info import feature_evidence

        plan, settings, listener = self.plan, self.settings, self.settings.listener
        given = settings.input_scale
        constant = None if given is None else constant_scales(plan, given)
        if settings.traces is None:
            return PlanInputs(static=constant)
        if reason := why_unused(plan, scale_is_given=constant is not None):
            if settings.cuts_rows:
                listener.note(f"--traces chose the rows, and is not used otherwise: {reason}")
            else:
                listener.warning(f"--traces is not used: {reason}")
            return PlanInputs(static=constant)
        traces = open_traces(settings.traces, settings.listener)
        draft, _, num_draft_tokens = draft_on_traces(
            plan.draft.checkpoint.folder,
            traces,
            device=settings.device,
            target=optional_path(settings.target),
            num_draft_tokens=settings.num_draft_tokens,
            subtree=plan.draft.checkpoint.subtree,
        )
        if few := few_for_correction(plan, draft, traces, num_draft_tokens):
            listener.note(few)
        spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="draftquant-moments-"))
        with listener.bar("calibrate", len(traces), "work") as bar:
            found = measured_inputs(
                plan,
                draft,
                traces,
                num_draft_tokens=num_draft_tokens,
                spool=Path(spool),
                static=constant,
                precise=settings.precise,
                on_progress=bar.set,
                on_stage_progress=measuring,
            )
        if fault := feature_evidence(traces).fault():
            listener.warning(f"{settings.traces}: {fault}")
        cache = plan.recipe.kv_cache
        if cache is not None and cache.scales != "unit":
            with listener.bar("cache", None, "work") as bar:
                scales = measure_cache_scales(
                    draft,
                    traces,
                    how=cache.scales,
                    num_draft_tokens=num_draft_tokens,
                    on_progress=bar.set,
                )
            found = dataclasses.replace(found, cache_scales=scales)
            listener.note(f"scales of the KV cache from {len(traces)} traces ({cache.scales})")
        if found.statistics is not None or found.static is not constant:
            what = "input scales" if found.statistics is None else "inputs"
            listener.note(f"{what} from {len(traces)} traces, steps 1..{num_draft_tokens}")
        if need_of(plan) != "codes":
            return found
        codes = learn(
            stack,
            plan,
            draft,
            traces,
            Path(settings.out),
            num_draft_tokens=num_draft_tokens,
            static=found.static,
            listener=listener,
        )
        return dataclasses.replace(found, found=codes)


# ---- The stages of a run of `quantize`, shown

TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> what it loads."""
_A_COLUMN = 3_000_000
"""Multiplications that take as long as what a column costs GPTQ whatever its size."""


class Phases:
    """Shows the stages of a run, and how far each is.

    Attributes:
        bar: that shows them; there is none before the run begins.
    """

    bar: "Bar | None" = None

    def __init__(self, plan: Plan, listener: "Listener") -> None:
        self._plan, self._listener = plan, listener
        self._left = sum(self._work(step) for step in plan.steps)
        self._written: set[str] = set()
        self._is_measuring = False

    def begin(self, stage: str) -> None:
        """The next stage."""
        self._listener.stage(stage)
        plan, bar = self._plan, self.bar
        assert bar is not None  # the run has begun
        if stage == "write" and plan.recipe.algorithm.rounding == "gptq":
            self._measure()
        elif stage == "write":
            bar.phase("quantize", plan.bytes_before, "bytes")
        elif stage == "start":
            bar.phase(f"load {TOOLKITS[plan.recipe.backend]}")
        elif stage == "verify":
            bar.phase("verify", plan.bytes_before + plan.bytes_after, "bytes")
        else:
            bar.phase("write to the disk")

    def measured(self, done: int, total: int) -> None:
        """So much of the traces has run through the draft, for the inputs of its linears."""
        if self.bar is None:
            return
        if not self._is_measuring:
            self._measure()
        self.bar.set(done, total)
        if done == total:
            self._is_measuring = False
            self._listener.stage("write")
            self.bar.phase("quantize", self._left, "work")

    def _measure(self) -> None:
        assert self.bar is not None  # the run has begun
        self._is_measuring = True
        self._listener.stage("measure")
        self.bar.phase("measure the linears' inputs", 1, "work")

    def written(self, step: Step) -> None:
        """A tensor is written; those that GPTQ rounds at the same time count when all are."""
        assert self.bar is not None  # the run has begun
        done = [step]
        if self._plan.recipe.algorithm.rounding == "gptq":
            done = self._finished_with(step)
        if done:
            work = sum(map(self._work, done))
            self._left -= work
            self.bar.advance(work)

    def _finished_with(self, step: Step) -> list[Step]:
        """The stage that ends with a step; nothing where one of its steps still runs."""
        self._written.add(step.row.tensor.name)
        stage = next(stage for stage in self._plan.stages() if step in stage)
        is_over = all(one.row.tensor.name in self._written for one in stage)
        return list(stage) if is_over else []

    def _work(self, step: Step) -> int:
        """Bytes; of a weight that GPTQ rounds, column by column, multiplications."""
        if step.action != "quantize" or self._plan.recipe_of(step).algorithm.rounding != "gptq":
            return step.bytes_before
        rows, columns = step.row.tensor.shape
        return step.bytes_before + columns * (_A_COLUMN + columns * (rows + columns))


# ---- `draftquant quantize`: plan, write, verify, publish

VERB = quantize


def run(options: argparse.Namespace) -> int:
    """Quantize, and print what was written and where it loads."""
    seconds = _Stopwatch()
    report = quantize.run(dataclasses.replace(options.settings, listener=seconds))
    seconds.stage("")
    for lint in report.lints if options.settings.fix_config else ():
        for key, value in lint.fix.items():
            stderr().line(f"config.json: {key} = {json.dumps(value)} ({lint.name})")
    if not is_ours(read_card(report.out)):
        card = report.out / CARD_FILE
        stderr().line(
            f"{CARD_FILE} is the source's; 'draftquant card {report.out} --out {card} --overwrite'"
            " puts the quantized draft's card in front of it"
        )
    if options.json:
        print_json({**_mapping(report, seconds.spent), "engines": to_mapping(report.loads)})
    else:
        print_report(report, seconds.spent)
        for line in verdict_lines(report.loads):
            stdout().line(line)
    return 0


def print_report(report: "QuantizeReport", seconds: dict[str, float]) -> None:
    """Print what was written and what verification found."""
    plan = report.plan
    times = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items())
    changed = len(plan.quantized) + len(report.balanced.keys() | report.learned_norms.keys())
    kept = len(plan.remaining.rows) - changed
    stdout().line(
        (str(report.out), "bold"),
        f": {len(plan.quantized)} linears quantized, "
        f"{kept} tensors kept byte for byte, "
        f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}, verified ({times})",
    )
    for step in plan.dropped:
        name = step.row.tensor.name
        stdout().line(
            f"{name}: dropped, {megabytes(step.bytes_before)}; it equals the target's"
            f" {report.dropped[name]} byte for byte, which engines use instead"
        )
    if report.few_inputs:
        stdout().line(few_inputs_line(report.few_inputs))
    for norm, exponent in report.balanced.items():
        stdout().line(
            f"{norm}: divided by 2^{exponent}, the embedding columns behind it multiplied by it"
            " (balance_concat: the same network, both halves under one scale)"
        )
    if report.learned_norms:
        stdout().line(
            f"norms that learned: {', '.join(sorted(report.learned_norms))}; no element changed by"
            f" a factor of more than {max(report.learned_norms.values()):.4g}"
        )


def few_inputs_line(few: Mapping[str, int]) -> str:
    """What was not rounded as the recipe says, for too few tokens were routed to it."""
    first, seen = min(few.items(), key=lambda item: item[1])
    return (
        f"{len(few)} linears of experts were rounded to nearest: the traces route too few tokens"
        f" to them (fewest: {seen} inputs of {first}; all of them in draftquant.json: few_inputs)"
    )


class _Stopwatch(OnTerminal):
    """Wall seconds per stage; a stage ends when the next one starts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stage = ""
        self._since = time.perf_counter()

    @override
    def stage(self, name: str) -> None:
        now = time.perf_counter()
        if self._stage:
            spent = self.spent.get(self._stage, 0)
            self.spent[self._stage] = spent + now - self._since
        self._stage, self._since = name, now


def _mapping(report: "QuantizeReport", seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "recipe": report.plan.recipe.name,
        "bytes_before": report.plan.bytes_before,
        "bytes_after": report.plan.bytes_after,
        "quantized": [step.row.tensor.name for step in report.plan.quantized],
        "cuts": [{"size": one.size, "vocabulary": one.vocabulary} for one in report.cuts],
        "config_changes": dict(report.config_changes),
        "dropped": dict(report.dropped),
        "balanced": dict(report.balanced),
        "learned_norms": dict(report.learned_norms),
        "few_inputs": dict(report.few_inputs),
        "damping": dict(report.damping),
        "lints": [one.name for one in report.lints],
        "warnings": list(report.warnings),
        "seconds": seconds,
        "verification": report.verification.to_mapping(),
    }
