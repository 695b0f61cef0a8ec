"""`quantize`: plan, write, verify, publish."""

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.drafts import Draft
from ...quantize.files.command_line import running_argv
from ...quantize.files.staging import check_output
from ...quantize.lints import Lint, find_lints
from ...quantize.quantization_plan import Plan, Step, make_plan
from . import arguments, reports
from .engine_verdicts import nothing_loads, verdicts_of
from .learning import learn
from .opening import chosen_recipe, draft_on_traces, open_draft, optional_path
from .option import Option
from .settings import Settings
from .verb import verb
from .watch import Bar, Watch

if TYPE_CHECKING:
    from ...calibration.linear_inputs.plan_inputs import PlanInputs


TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> what it loads."""


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
    target_layers: arguments.TargetLayers = None
    traces: Annotated[
        arguments.AnyPath | None,
        Option(
            "calibration traces for static activation scales and for algorithms that look at"
            " inputs",
            "TRACES",
        ),
    ] = None
    input_scale: Annotated[
        float | None, Option("one static activation scale for all linears", "SCALE")
    ] = None
    num_draft_tokens: arguments.NumDraftTokens = None
    device: arguments.Device = "auto"
    target: arguments.Target = None
    allow_zero_rows: arguments.AllowZeroRows = False
    fix_config: arguments.FixConfig = False


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
        source, and all warnings. Each warning is a Python warning (`DraftQuantWarning`) too.

    Raises:
        DraftQuantError: a stage failed: reading, planning, computing, writing or verifying. Nothing
            is left behind.
    """
    from ...quantize.checks import check_retuning, check_tables
    from ...quantize.quantize_draft import quantize_draft

    watch, fix_config = settings.watch, settings.fix_config
    own_target, folder = optional_path(settings.target), Path(settings.out)
    source, opened = open_draft(settings.draft, settings.subtree)
    chosen = chosen_recipe(
        settings.recipe, backend=settings.backend, algorithm=settings.algorithm, watch=watch
    )
    plan = make_plan(chosen, opened, target_layers=settings.target_layers)
    check_retuning(plan, None)
    proven = check_tables(plan, own_target)
    verdicts, lints = verdicts_of(plan, fix_config=fix_config), tuple(find_lints(opened))
    for problem in (looks_like_a_target(opened), nothing_loads(plan, verdicts)):
        if problem is not None:
            watch.warning(problem)
    check_output(folder, plan.draft.checkpoint.folder)  # before anything that takes long
    with ExitStack() as stack:
        measuring = _Measuring()
        inputs = _Inputs(plan, settings).found(stack, measuring)
        bar = measuring.bar = stack.enter_context(watch.bar("check", None))
        begin = _Phases(bar, plan, watch)

        def advance(step: Step) -> None:
            bar.advance(step.bytes_before)

        report = quantize_draft(
            plan,
            folder,
            source=source,
            argv=running_argv(),
            measured=inputs.measured,
            allow_zero_rows=settings.allow_zero_rows,
            fix_config=fix_config,
            target=own_target,
            proven=proven,
            on_progress=advance,
            on_stage=begin,
            on_verified=bar.set,
        )
    if left := lints_left(settings.draft, lints, fix_config=fix_config):
        watch.warning(left)
    return dataclasses.replace(report, loads=verdicts, lints=lints)


def looks_like_a_target(draft: Draft) -> str | None:
    """Said of a whole language model: it may be a draft of its own kind, or the target."""
    if not draft.family.is_whole_model:
        return None
    size = sum(row.tensor.nbytes for row in draft.rows) / 1e9
    return (
        f"{draft.checkpoint.folder.name} is a whole language model ({size:.2f} GB,"
        f" {draft.geometry.num_layers} layers): right if a server drafts with it, beside a larger"
        " target; if it is the target itself, give the folder of its draft instead"
    )


def lints_left(draft: object, lints: Sequence[Lint], *, fix_config: bool) -> str | None:
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

    def found(self, stack: ExitStack, measuring: "_Measuring") -> "PlanInputs":
        """What the recipe needs, or what the algorithm does; there until the stack is left."""
        from ...calibration.linear_inputs.plan_inputs import (
            PlanInputs,
            check_traces_wanted,
            measured_inputs,
            need_of,
        )
        from ...calibration.linear_inputs.static_scales import constant_scales
        from ...calibration.traces.feature_evidence import feature_evidence
        from ...calibration.traces.trace_folder import TraceFolder

        plan, settings, watch = self.plan, self.settings, self.settings.watch
        given = settings.input_scale
        constant = None if given is None else constant_scales(plan, given)
        if settings.traces is None:
            return PlanInputs(static=constant)
        check_traces_wanted(plan, scale_is_given=constant is not None)
        traces = TraceFolder.open(Path(settings.traces))
        draft, _, num_draft_tokens = draft_on_traces(
            plan.draft.checkpoint.folder,
            traces,
            device=settings.device,
            target=optional_path(settings.target),
            num_draft_tokens=settings.num_draft_tokens,
        )
        spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="draftquant-moments-"))
        with watch.bar("calibrate", len(traces)) as bar:
            found = measured_inputs(
                plan,
                draft,
                traces,
                num_draft_tokens=num_draft_tokens,
                spool=Path(spool),
                static=constant,
                on_progress=bar.set,
                on_stage_progress=measuring,
            )
        if fault := feature_evidence(traces).fault():
            watch.warning(f"{settings.traces}: {fault}")
        if need_of(plan) != "codes" or plan.recipe.needs_input_scales:
            what = "input scales" if found.statistics is None else "inputs"
            watch.note(f"{what} from {len(traces)} traces, steps 1..{num_draft_tokens}")
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
            watch=watch,
        )
        return dataclasses.replace(found, found=codes)


class _Phases:
    """Shows the stages of a run."""

    def __init__(self, bar: Bar, plan: Plan, watch: Watch) -> None:
        self._bar, self._plan, self._watch = bar, plan, watch

    def __call__(self, stage: str) -> None:
        """The next stage."""
        self._watch.stage(stage)
        if stage == "write":
            self._bar.phase("quantize", self._plan.bytes_before, "bytes")
        elif stage == "start":
            self._bar.phase(f"load {TOOLKITS[self._plan.recipe.backend]}")
        elif stage == "verify":
            self._bar.phase("verify", self._plan.bytes_before + self._plan.bytes_after, "bytes")
        else:
            self._bar.phase("write to the disk")


class _Measuring:
    """Shows how far the measurement of a stage is, beside the tensors written."""

    bar: Bar | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many prompts of all."""
        if self.bar is not None:
            measured = f", inputs of {done} of {total} prompts" if done < total else ""
            self.bar.label(f"quantize{measured}")
