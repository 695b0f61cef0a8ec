"""`quantize`: plan, write, verify, publish."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.drafts import Draft
from ...quantize.files.staging import check_output
from ...quantize.lints import Lint, find_lints
from ...quantize.plan import Plan, Step, make_plan
from ...recipes import Recipe
from ...recipes.schema import BackendName
from .learning import learn
from .loading import nothing_loads, verdicts_of
from .opening import Reference, chosen_recipe, draft_on_traces, open_draft, optional_path
from .watch import SILENT, Bar, Watch

if TYPE_CHECKING:
    from ...calibration.linear_inputs.plan_inputs import PlanInputs
    from ...quantize.quantize import QuantizeReport


TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> what it loads."""


def quantize(
    draft: Reference,
    recipe: Recipe | Reference,
    out: str | Path,
    *,
    subtree: str | None = None,
    backend: BackendName | None = None,
    algorithm: str | None = None,
    target_layers: int | None = None,
    traces: str | Path | None = None,
    input_scale: float | None = None,
    num_draft_tokens: int | None = None,
    device: str = "auto",
    target: str | Path | None = None,
    allow_zero_rows: bool = False,
    fix_config: bool = False,
    argv: Sequence[str] = (),
    on_plan: Callable[[Plan], None] = lambda _plan: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
    watch: Watch = SILENT,
) -> "QuantizeReport":
    """Quantize a draft into a new folder, which appears whole and verified, or not at all.

    Example:
        >>> report = draftquant.quantize("DRAFT", "int4-channel", "OUT")
        >>> report.verification.ok
        True
        >>> len(report.plan.quantized), report.plan.bytes_before > report.plan.bytes_after
        (7, True)

    Args:
        draft: folder or Hub id of the BF16 draft.
        recipe: built-in name, file, or resolved.
        out: folder to create; nothing existing is overwritten.
        subtree: prefix of the MTP layer that is the draft, where the folder is its target's.
        backend: who computes the codes, instead of the recipe's choice.
        algorithm: how codes and scales are found, instead of the recipe's choice: "absmax", "mse",
            "gptq" or "learned", or one of a toolkit.
        target_layers: decoder layers of the target, for layouts whose excludes are whole names.
        traces: folder of calibration traces, for static activation scales and for algorithms that
            look at inputs.
        input_scale: one static activation scale for all linears, above 0, instead of `traces`.
        num_draft_tokens: K, as it will be served; None = 3, or a block draft's whole block.
        device: where the draft runs along the traces: "auto", "cpu", "cuda" or "cuda:I".
        target: folder of the target, for drafts without embedding or head where the traces carry
            neither, and for recipes that drop what equals the target's.
        allow_zero_rows: store all-zero rows instead of refusing them.
        fix_config: change the output's config.json as the lints of the draft ask for.
        argv: a command line for draftquant.json, which `card` shows.
        on_plan: called with the plan before anything is written; what it raises ends the run.
        on_stage: called with "write" and "verify" when they begin.
        watch: sees how far the run is.

    Returns:
        What was written, with its plan, what verification found, what engines do with it, and all
        warnings, which are also Python warnings (`DraftQuantWarning`) where nobody watches.

    Raises:
        DraftQuantError: of the stage that failed; nothing is left behind.
    """
    from ...quantize.checks import check_retuning, check_tables
    from ...quantize.quantize import quantize_draft

    own_target, folder = optional_path(target), Path(out)
    said = _Warnings(watch)
    source, opened = open_draft(draft, subtree)
    chosen = chosen_recipe(recipe, backend=backend, algorithm=algorithm)
    plan = make_plan(chosen, opened, target_layers=target_layers)
    check_retuning(plan, None)
    proven = check_tables(plan, own_target)
    verdicts, lints = verdicts_of(plan, fix_config=fix_config), tuple(find_lints(opened))
    said.add(looks_like_a_target(opened))
    said.add(nothing_loads(plan, verdicts))
    on_plan(plan)
    check_output(folder, plan.draft.checkpoint.folder)  # before anything that takes long
    with ExitStack() as stack:
        measuring = _Measuring()
        inputs = _Inputs(
            plan, folder, optional_path(traces), num_draft_tokens, device, own_target, watch, said
        ).found(stack, measuring, input_scale)
        bar = measuring.bar = stack.enter_context(watch.bar("check", None))
        begin = _Phases(bar, plan, on_stage)

        def advance(step: Step) -> None:
            bar.advance(step.bytes_before)

        report = quantize_draft(
            plan,
            folder,
            source=source,
            argv=argv,
            input_scales=inputs.static.scales if inputs.static else None,
            input_scale_origin=inputs.static.origin if inputs.static else None,
            statistics=inputs.statistics,
            found=inputs.found,
            calibration_prompts=inputs.prompts,
            allow_zero_rows=allow_zero_rows,
            fix_config=fix_config,
            target=own_target,
            proven=proven,
            on_progress=advance,
            on_stage=begin,
            on_verified=bar.set,
        )
    said.add(lints_left(draft, lints, fix_config=fix_config))
    return dataclasses.replace(report, loads=verdicts, lints=lints, warnings=said.texts)


class _Warnings:
    """What is told to who watches, and kept for the report."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self.texts = watch, tuple[str, ...]()

    def add(self, text: str | None) -> None:
        """None = nothing is wrong."""
        if text is not None:
            self.texts += (text,)
            self._watch.warning(text)


def looks_like_a_target(draft: Draft) -> str | None:
    """Said of a whole language model: it may be a draft of its own kind, or the target."""
    if draft.family.name != "language-model":
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
    """Where what a plan must know of inputs comes from; fields as in `quantize`."""

    plan: Plan
    out: Path
    traces: Path | None
    num_draft_tokens: int | None
    device: str
    target: Path | None
    watch: Watch
    said: "_Warnings"

    def found(
        self, stack: ExitStack, measuring: "_Measuring", input_scale: float | None
    ) -> "PlanInputs":
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

        plan, watch, said = self.plan, self.watch, self.said
        constant = None if input_scale is None else constant_scales(plan, input_scale)
        if self.traces is None:
            return PlanInputs(static=constant)
        check_traces_wanted(plan, scale_is_given=constant is not None)
        traces = TraceFolder.open(self.traces)
        draft, _, num_draft_tokens = draft_on_traces(
            plan.draft.checkpoint.folder,
            traces,
            device=self.device,
            target=self.target,
            num_draft_tokens=self.num_draft_tokens,
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
            said.add(f"{self.traces}: {fault}")
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
            self.out,
            num_draft_tokens=num_draft_tokens,
            static=found.static,
            watch=watch,
        )
        return dataclasses.replace(found, found=codes)


class _Phases:
    """Shows the stages of a run."""

    def __init__(self, bar: Bar, plan: Plan, on_stage: Callable[[str], None]) -> None:
        self._bar, self._plan, self._on_stage = bar, plan, on_stage

    def __call__(self, stage: str) -> None:
        """The next stage."""
        self._on_stage(stage)
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
