"""`quantize`: plan, write, verify, publish."""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.command_line import running_argv
from ...quantize.files.staging import check_output
from ...quantize.measured import NOTHING_MEASURED, Measured
from ...quantize.quantization_plan import Plan, make_plan
from ...recipes.bounds import AT_LEAST_1, SHARE_OR_ALL
from . import arguments, reports
from .engine_verdicts import nothing_loads, verdicts_of
from .learning import learn
from .opened_traces import open_traces
from .opening import chosen_recipe, draft_on_traces, open_draft
from .option import Option
from .references import optional_path
from .settings import Settings, SettingsError
from .verb import verb

if TYPE_CHECKING:
    import torch

    from ...calibration.linear_inputs.plan_inputs import PlanInputs
    from ...quantize.drafts import Draft
    from ...quantize.files.hub import DraftSource
    from ...quantize.lints import Lint
    from ...recipes import Recipe


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
    from .cut_rows import RowsAsked, with_chosen_rows

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
    from ...quantize.checks import check_tables
    from ...quantize.lints import find_lints
    from ...quantize.quantize_draft import quantize_draft
    from .quantize_phases import Phases

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
    from ...calibration.passes.devices import resolve_device

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
        from ...calibration.kv_cache.cache_scales import measure_cache_scales
        from ...calibration.linear_inputs.plan_inputs import (
            PlanInputs,
            few_for_correction,
            measured_inputs,
            need_of,
            why_unused,
        )
        from ...calibration.linear_inputs.static_scales import constant_scales
        from ...calibration.traces.feature_evidence import feature_evidence

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
