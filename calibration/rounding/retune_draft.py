"""`retune_draft`: a quantized draft that its target taught, and the unquantized draft taught alike.

What both learn are linears: the quantized one the latents and scales of its codes, the other one
its weights; everything else stays, byte for byte. The same prompts in the same order, steps, loss
and rates: so what the first accepts less than the second is what quantization costs, and what both
accept more than the draft as released is training.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ...quantize.checks import check_source
from ...quantize.drafts.kv_cache import CacheScales
from ...quantize.errors import CheckpointError, OutputError
from ...quantize.files.digests import tensors_sha256
from ...quantize.files.how_rounded import LearnedRounding
from ...quantize.files.hub import DraftSource
from ...quantize.files.provenance import TunedProvenance
from ...quantize.files.provenance_file import read_provenance
from ...quantize.files.retuning import Retuning, marked_card
from ...quantize.files.staging import check_output
from ...quantize.quantization_plan import Plan
from ...quantize.quantize_draft import QuantizeReport, quantize_draft
from ...quantize.stored.loading import LoadedDraft
from ...quantize.verify import verify
from ...quantize.write_tuned import write_tuned
from ...recipes.brief import Brief
from ...recipes.errors import short
from ..errors import CalibrationError
from ..kv_cache.cache_scales import measure_cache_scales
from ..linear_inputs.plan_inputs import PlanInputs
from ..linear_inputs.static_scales import calibrated_scales
from ..traces.trace_folder import TraceFolder
from .learn import canonical, check_recipe, learned_codes, learned_steps, stored_weight
from .learning_run import SAVE_SECONDS, LearningTask, Start, learned_beside, rounding_folder
from .learning_settings import RETUNING, LearningSettings
from .plain_weight import PlainWeight
from .validation import LearningProgress

Side = Literal["baseline", "quantized"]
OnProgress = Callable[[Side, LearningProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RetuneReport(Brief):
    """A quantized draft that was fine-tuned, and its BF16 control.

    Attributes:
        quantized: the quantized and fine-tuned draft.
        learned: how it learned.
        baseline: folder of the BF16 control, which was fine-tuned identically.
        baseline_learned: how the control learned.
        made_before: the control existed already and was left as it is.
        retuning: what is recorded of the fine-tuning.
    """

    quantized: QuantizeReport
    learned: LearnedRounding
    baseline: Path
    baseline_learned: LearnedRounding
    made_before: bool
    retuning: Retuning

    @override
    def brief(self) -> Mapping[str, object]:
        report = self.quantized
        return {
            "verified": "verified" if report.verification.ok else "WRONG, not as its source",
            "out": report.out,
            "recipe": report.plan.recipe.name,
            "BF16 control": self.baseline,
            "control": "made before" if self.made_before else "made now",
        }


def retune_draft(
    plan: Plan,
    draft: LoadedDraft,
    traces: TraceFolder,
    out: Path,
    baseline: Path,
    *,
    source: DraftSource,
    num_draft_tokens: int,
    settings: LearningSettings = RETUNING,
    allow_zero_rows: bool = False,
    argv: Sequence[str] = (),
    save_seconds: float = SAVE_SECONDS,
    on_progress: OnProgress = lambda _side, _progress: None,
) -> RetuneReport:
    """Teach the unquantized draft, then the quantized one; each folder appears whole or not at all.

    The baseline does not depend on the recipe but for the linears that it quantizes. One that an
    earlier run made of the same draft, prompts and settings is used as it is; nothing else that
    exists is. A run that is cut short goes on when it is called with the same arguments.

    Args:
        plan: of this draft, by a recipe with `rounding: retuned`.
        draft: unquantized, computing in float32; on a GPU products are of BF16.
        traces: recorded for calibration, not the ones that the gate judges on.
        out: folder to create, of the quantized draft.
        baseline: folder to create, of the unquantized one.
        source: where the draft came from, for provenance.
        num_draft_tokens: K, as it will be served.
        settings: with a teacher.
        allow_zero_rows: store all-zero rows instead of refusing them.
        argv: the command line, for provenance.
        save_seconds: at least between two states on the disk.
        on_progress: called after every step, with the side that learns.

    Raises:
        BackendError: the recipe's format cannot be learned, or it does not say `retuned`.
        OutputError: `out` exists, or `baseline` does and is not what this run would make.
        TraceError: the traces do not fit the draft.
        CalibrationError: there are too few prompts.
        ForwardError: the draft computes NaN or infinity.
        DraftQuantError: of the stage that failed.
    """
    teaching = settings.teaching
    if teaching is None:
        raise CalibrationError(
            "retuning: settings", "expected a teacher, got none", fix="leave them out: RETUNING"
        )
    task = LearningTask(
        draft=draft,
        traces=traces,
        num_draft_tokens=num_draft_tokens,
        settings=settings,
        what={"linears": [step.row.module for step in learned_steps(plan)]},
    )
    _check(plan, task, out, baseline)
    retuning = Retuning(
        learning_rate=settings.learning_rate,
        temperature=teaching.temperature,
        anchor=teaching.anchor,
        learned_prompts=len(task.split().learned),
        linears=tuple(sorted(step.row.module for step in learned_steps(plan))),
        settings_sha256=_settings_sha256(settings),
    )
    marked_card(plan.draft.checkpoint.folder, retuning)  # what cannot be read is told before work
    made_before = baseline.exists()
    if not made_before or rounding_folder(baseline).exists():
        _write_baseline(
            plan, task, baseline, retuning, source=source, argv=argv, save_seconds=save_seconds,
            on_progress=on_progress,
        )  # fmt: skip
    found = _checked_baseline(plan, task, baseline, retuning)
    retuning = dataclasses.replace(retuning, baseline_sha256=tensors_sha256(found.digests))
    static = None
    if plan.recipe.needs_input_scales:
        static = calibrated_scales(plan, draft, traces, num_draft_tokens=num_draft_tokens)
    cache = plan.recipe.kv_cache
    cached: Mapping[int, CacheScales] = {}
    if cache is not None and cache.scales != "unit":
        cached = measure_cache_scales(
            draft, traces, how=cache.scales, num_draft_tokens=num_draft_tokens
        )
    with learned_codes(
        plan,
        draft,
        traces,
        out,
        num_draft_tokens=num_draft_tokens,
        static=static,
        settings=settings,
        save_seconds=save_seconds,
        on_progress=partial(on_progress, "quantized"),
    ) as codes:
        quantized = quantize_draft(
            plan,
            out,
            source=source,
            argv=argv,
            measured=PlanInputs(
                static=static, found=codes, prompts=codes.prompts, cache_scales=cached
            ).measured,
            retuning=retuning,
            allow_zero_rows=allow_zero_rows,
        )
        return RetuneReport(
            quantized=quantized,
            learned=codes.origin,
            baseline=baseline,
            baseline_learned=found.learned,
            made_before=made_before,
            retuning=retuning,
        )


def _check(plan: Plan, task: LearningTask, out: Path, baseline: Path) -> None:
    """Before any work."""
    folder = plan.draft.checkpoint.folder
    if out.absolute() == baseline.absolute():
        raise OutputError(out, "--out and --baseline name the same folder", fix="give two folders")
    check_output(out, folder, needed_bytes=plan.bytes_after)
    if not baseline.exists():
        check_output(baseline, folder, needed_bytes=plan.bytes_before)
    _, cuts = check_source(plan)
    if cuts:
        raise CheckpointError(
            folder,
            f"its vocabulary was cut ({cuts[-1]}), and a draft is fine-tuned with all its tokens",
            fix="retune the draft as released, then cut what comes of it",
        )
    check_recipe(plan.recipe, task.settings)
    task.check()


def _write_baseline(
    plan: Plan,
    task: LearningTask,
    baseline: Path,
    retuning: Retuning,
    *,
    source: DraftSource,
    argv: Sequence[str],
    save_seconds: float,
    on_progress: OnProgress,
) -> None:
    draft = task.draft

    def start() -> Start:
        latents = {
            canonical(step): PlainWeight(stored_weight(step, draft), device=draft.device)
            for step in learned_steps(plan)
        }
        return Start(draft, latents, lambda _name, x: x)

    with learned_beside(
        baseline,
        task,
        start,
        save_seconds=save_seconds,
        on_progress=partial(on_progress, "baseline"),
    ) as found:
        if not baseline.exists():  # else a run was killed right behind it: its state is removed
            write_tuned(
                plan.draft,
                baseline,
                found.weight,
                source=source,
                learned=found.origin,
                retuning=retuning,
                calibration_prompts=found.prompts,
                argv=argv,
            )


def _checked_baseline(
    plan: Plan, task: LearningTask, baseline: Path, retuning: Retuning
) -> TunedProvenance:
    """The record of the baseline that this run made, or an earlier one like it.

    Raises:
        OutputError: it is another folder, or another retuning's.
    """
    settings, record = task.settings, read_provenance(baseline)
    if not isinstance(record, TunedProvenance):
        raise _not_overwritten(
            baseline, "it does not hold an unquantized draft that was fine-tuned"
        )
    wanted = {
        "traces_sha256": task.traces.sha256,
        "num_draft_tokens": task.num_draft_tokens,
        "steps": settings.steps,
        "sequences": settings.sequences,
        "seed": settings.seed,
        **dataclasses.asdict(retuning),
    }
    said = dataclasses.asdict(record.learned) | dataclasses.asdict(record.retuning)
    for key, value in wanted.items():
        if said[key] != value:
            what = (
                f"it was fine-tuned with other settings ({key}: {short(said[key])}, now"
                f" {short(value)})"
            )
            raise _not_overwritten(baseline, what)
    report = verify(baseline, plan.draft.checkpoint.folder)
    if report.faults:
        raise _not_overwritten(baseline, f"its files were changed: {report.faults[0]}")
    return record


def _settings_sha256(settings: LearningSettings) -> str:
    text = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _not_overwritten(baseline: Path, why: str) -> OutputError:
    return OutputError(
        baseline,
        f"already exists and cannot be reused: {why}",
        fix="give another --baseline, or move this one away",
    )
