"""One run of quantizing a draft: opened, cut if requested, measured on traces, written."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ...quantize.asked import Quantizing
from ...quantize.drafts.family import Lint
from ...quantize.engines.plan_verdicts import nothing_loads, planned_verdicts
from ...quantize.files.hub import DraftSource, running_argv
from ...quantize.files.provenance import ChosenAmong
from ...quantize.files.staging import check_output
from ...quantize.inspection import open_draft
from ...quantize.lints.catalogue import find_lints
from ...quantize.making.preparing import check_tables, checked_measured
from ...quantize.making.quantize_draft import QuantizeReport, quantize_draft
from ...quantize.pairing.pair_check import loads_beside
from ...quantize.planning.quantization_plan import (
    NOTHING_MEASURED,
    MeasuredInputs,
    Plan,
    Step,
    make_plan,
)
from ...recipes.brief import counted
from ...recipes.chosen_recipe import chosen_recipe
from ...recipes.errors import CheckpointError
from ...recipes.listener import Bar, Listener, Progress, beyond_kept
from ...recipes.regular_file import optional_path
from ..linear_inputs.plan_inputs import few_for_correction, measured_inputs, need_of, why_unused
from ..linear_inputs.static_scales import constant_scales
from ..measured_cache import measure_cache_scales
from ..passes.devices import resolve_device
from ..passes.draft_inputs import DraftRun
from ..passes.on_traces import draft_on_traces, open_traces
from ..rounding.learn import learned_codes
from ..rounding.learned_state import LearnedCodes, LearningProgress, LearningSettings
from ..traces.feature_evidence import feature_evidence
from ..vocabulary.vocabulary_rows import with_chosen_rows


def quantize_as_asked(asked: Quantizing, chosen: ChosenAmong | None = None) -> QuantizeReport:
    """Quantize a folder or Hub id into a new folder, which is complete and verified or absent.

    `chosen`: how its recipe was chosen, for the record.
    """
    if asked.device not in ("auto", "cpu"):
        resolve_device(asked.device)  # refuse before anything that takes long
    listener = asked.listener
    source, opened = open_draft(asked.draft, asked.subtree, listener, asked.roles)
    recipe = chosen_recipe(asked.choice, listener)
    with ExitStack() as stack:
        if asked.vocab_size is not None:
            source, opened = stack.enter_context(with_chosen_rows(source, recipe, asked))
        plan = make_plan(recipe, opened, target_layers=asked.target_layers)
        report = _quantized(stack, plan, source, asked, chosen)
    if asked.target is not None:
        report = _beside_target(report, Path(asked.target), listener)
    if left := lints_left(asked.draft, report.lints, fix_config=asked.fix_config):
        listener.warning(left)
    return report


def _beside_target(report: QuantizeReport, target: Path, listener: Listener) -> QuantizeReport:
    """The report with what engines do with the pair, if the target's config.json can be read."""
    try:
        pairs = loads_beside(report.out, target)
    except CheckpointError as exc:
        listener.warning(f"engines were asked about the draft alone: {exc.where}: {exc.what}")
        return report
    answers = tuple(each.judged for each in pairs)
    changed = (now for each, now in zip(pairs, answers, strict=True) if now is not each.answer)
    for check in {(now.engine, now.error): now for now in changed}.values():
        text = f"beside {target}: {check.verdict} in {check.title}: {check.error}"
        listener.warning(f"{text}\n  what to do: {check.remedy}" if check.remedy else text)
    return dataclasses.replace(report, loads=answers)


def _quantized(
    stack: ExitStack,
    plan: Plan,
    source: DraftSource,
    asked: Quantizing,
    chosen: ChosenAmong | None,
) -> QuantizeReport:
    out, target, listener = Path(asked.out), optional_path(asked.target), asked.listener
    proven = check_tables(plan, target)
    scale = asked.input_scale
    constant = NOTHING_MEASURED if scale is None else constant_scales(plan, scale)
    if asked.traces is None:
        checked_measured(plan, constant)  # before a list of what else might be asked for
    verdicts = planned_verdicts(plan, fix_config=asked.fix_config)
    lints = tuple(find_lints(plan.draft))
    if (problem := nothing_loads(plan, verdicts)) is not None:
        listener.warning(problem)
    check_output(out, plan.draft.checkpoint.folder)  # before anything that takes long
    phases = Phases(plan, listener)
    measured = _measured(stack, plan, asked, constant, phases.measured)
    bar = phases.bar = stack.enter_context(listener.bar("check", None))
    report = quantize_draft(
        plan,
        out,
        source=source,
        argv=running_argv(),
        measured=measured,
        allow_zero_rows=asked.allow_zero_rows,
        fix_config=asked.fix_config,
        target=target,
        proven=proven,
        chosen=chosen,
        on_progress=phases.written,
        on_stage=phases.begin,
        on_verified=bar.set,
        device=partial(resolve_device, asked.device),
    )
    if report.damping:
        listener.warning(raised_damping(report.damping))
    return dataclasses.replace(report, loads=verdicts, lints=lints)


def _measured(
    stack: ExitStack, plan: Plan, asked: Quantizing, constant: MeasuredInputs, measuring: Progress
) -> MeasuredInputs:
    """What the recipe needs about inputs, or the algorithm; it exists until the stack is left."""
    listener = asked.listener
    if asked.traces is None:
        return constant
    if reason := why_unused(plan, constant):
        if asked.vocab_size is not None:
            listener.note(f"--traces chose the rows, and is not used otherwise: {reason}")
        else:
            listener.warning(f"--traces is not used: {reason}")
        return constant
    traces = open_traces(asked.traces, listener)
    run = draft_on_traces(
        plan.draft.checkpoint.folder,
        traces,
        device=asked.device,
        target=optional_path(asked.target),
        num_draft_tokens=asked.num_draft_tokens,
        subtree=plan.draft.checkpoint.subtree,
    )
    if few := few_for_correction(plan, run):
        listener.note(few)
    spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="draftquant-moments-"))
    with listener.bar("calibrate", len(traces), "work") as bar:
        measured = measured_inputs(
            plan,
            run,
            spool=Path(spool),
            static=constant,
            precise=asked.precise,
            on_progress=bar.set,
            on_stage_progress=measuring,
        )
    if fault := feature_evidence(traces).fault():
        listener.warning(f"{asked.traces}: {fault}")
    cache, recorded = plan.recipe.kv_cache, counted(len(traces), "trace")
    if cache is not None and cache.scales != "unit":
        scales = measure_cache_scales(run, how=cache.scales, listener=listener)
        measured = dataclasses.replace(measured, cache_scales=scales)
        listener.note(f"scales of the KV cache from {recorded} ({cache.scales})")
    if measured.statistics is not None or (measured.input_scales and not constant.input_scales):
        what = "input scales" if measured.statistics is None else "inputs"
        listener.note(f"{what} from {recorded}, steps 1..{run.num_draft_tokens}")
    if need_of(plan) == "codes":
        codes = learn(stack, plan, run, Path(asked.out), static=measured, listener=listener)
        measured = dataclasses.replace(measured, found=codes)
    return measured


def raised_damping(damping: Mapping[str, float]) -> str:
    """A note where second moments had no factor with the usual damping."""
    name, most = max(damping.items(), key=lambda item: item[1])
    return (
        f"GPTQ: the second moments of the inputs of {len(damping)} linear(s) have no Cholesky"
        f" factor with 0.01 of their mean on the diagonal; more was added (up to {most:g}, {name}),"
        " so errors are made up for less there\n  calibrate on more prompts, or try --precise"
    )


def lints_left(draft: object, lints: Sequence[Lint], *, fix_config: bool) -> str | None:
    """Which warnings of the source's config.json stay in the output, and how to remove them."""
    left = [lint for lint in lints if lint.level == "warning" and not (fix_config and lint.fix)]
    if not left:
        return None
    text = f"lints: {', '.join(lint.name for lint in left)}; see 'draftquant inspect {draft}'"
    fixable = ", ".join(lint.name for lint in left if lint.fix)
    unknown = "cannot correct these: config.json does not show which values are right"
    how = f"corrects {fixable} in the output" if fixable else unknown
    return f"{text}\n  --fix-config {how}" if fixable or fix_config else text


TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> the toolkit that it loads."""
_A_COLUMN = 3_000_000
"""Multiplications in the time that a column costs GPTQ whatever its size."""


class Phases:
    """Shows the stages of a run, and the progress of each; no bar before the run begins."""

    bar: Bar | None = None

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan, self._listener = plan, listener
        self._left = sum(self._work(step) for step in plan.steps)
        self._written: set[str] = set()
        self._is_measuring = False

    def begin(self, stage: str) -> None:
        """Begin the next stage."""
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
        """Part of the traces has run through the draft, for the inputs of its linears."""
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
        """A tensor is written; those that GPTQ rounds at the same time count when all are done."""
        assert self.bar is not None  # the run has begun
        done = [step]
        if self._plan.recipe.algorithm.rounding == "gptq":
            done = self._finished_with(step)
        if done:
            work = sum(map(self._work, done))
            self._left -= work
            self.bar.advance(work)

    def _finished_with(self, step: Step) -> list[Step]:
        """The stage that ends with a step; empty where one of its steps still runs."""
        self._written.add(step.row.tensor.name)
        stage = next(stage for stage in self._plan.stages() if step in stage)
        is_over = all(each.row.tensor.name in self._written for each in stage)
        return list(stage) if is_over else []

    def _work(self, step: Step) -> int:
        """Bytes; for a weight that GPTQ rounds, column by column, multiplications."""
        if step.action != "quantize" or self._plan.recipe_of(step).algorithm.rounding != "gptq":
            return step.bytes_before
        rows, columns = step.row.tensor.shape
        return step.bytes_before + columns * (_A_COLUMN + columns * (rows + columns))


FEW_PROMPTS = 128  # with fewer, a warning comes before learning begins


def learn(
    stack: ExitStack,
    plan: Plan,
    run: DraftRun,
    out: Path,
    *,
    static: MeasuredInputs,
    listener: Listener,
) -> LearnedCodes:
    """Learn codes with the default settings; they exist until the stack is left."""
    settings = LearningSettings()
    if len(run.traces) < FEW_PROMPTS:
        listener.note(
            f"learned rounding from {counted(len(run.traces), 'prompt')}, of which about"
            f" {settings.validation_share:.0%} are held back: from 256 prompts the draft comes"
            " closer to the unquantized one (draftquant record)"
        )
    with listener.bar("learn", settings.steps) as bar:
        shown = beyond_kept(bar, own=1)
        measures = False

        def measuring(done: int, total: int) -> None:
            nonlocal measures
            if not measures:
                bar.phase("measure the linears' inputs", total, "work")
                measures = True
            bar.set(done, total)
            if done == total:
                bar.phase("learn", settings.steps)
                measures = False

        def show(progress: LearningProgress) -> None:
            shown(progress.step, progress.steps)
            if progress.validation.step == progress.step:
                listener.note(_line(progress))

        codes = stack.enter_context(
            learned_codes(
                plan,
                run,
                out,
                static=static,
                settings=settings,
                on_measuring=measuring,
                on_progress=show,
            )
        )
    origin = codes.origin
    held_back = counted(origin.validation_prompts, "prompt")
    listener.note(
        f"learned rounding keeps step {origin.kept_step}: on {held_back} held back the acceptance"
        f" length is {origin.acceptance_length:.3f} (before learning"
        f" {origin.acceptance_length_before:.3f}, unquantized"
        f" {origin.acceptance_length_unquantized:.3f}) and the overlap with the unquantized draft"
        f" {origin.overlap:.2%} (before {origin.overlap_before:.2%})"
    )
    return codes


def _line(progress: LearningProgress) -> str:
    score = progress.validation
    return (
        f"step {progress.step} of {progress.steps}, loss {progress.loss:.5f}; on the prompts held"
        f" back the acceptance length is {score.acceptance_length:.3f} (unquantized"
        f" {score.unquantized:.3f}) and the overlap with the unquantized draft"
        f" {score.overlap:.2%}; the best so far is step {progress.best.step}"
    )
