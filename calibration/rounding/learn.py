"""Learning the codes of a plan beside the output that they are for, or going on where it was left.

Memory, for P weights that are learned, beside the draft as it is stored: latents, two moments and
a gradient, 16 P bytes; codes times scales, their gradient and what the straight-through estimators
hold, another 16 P; and the passes of one trace. Logits are held for some rows only. That is 25 to
30 GB for the 0.7 G weights of a Kimi draft. On the disk the state takes 12 P bytes.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from ...quantize.algorithms import get_algorithm
from ...quantize.drafts.fused import fused_group
from ...quantize.errors import BackendError
from ...quantize.files.provenance import LearnedRounding, package_version
from ...quantize.files.resumable import resumable_folder
from ...quantize.files.staging import check_output
from ...quantize.plan import Plan, Step
from ...quantize.quantize import check_backends
from ...quantize.stored.loading import LoadedDraft
from ...recipes.schema import Algorithm, recipe_sha256
from ..errors import CalibrationError
from ..linear_inputs.plan_inputs import served_rounding
from ..linear_inputs.static_scales import StaticScales, balanced_draft
from ..passes.draft_inputs import check_trace_fits
from ..passes.predictions import num_draft_tokens_fault
from ..traces.folder import TraceFolder
from .kept import KeptRounding, LearnedCodes
from .latent_weight import LatentWeight
from .learning import Learning
from .sequences import PromptSplit, split_prompts
from .settings import LearningSettings
from .validation import LearningProgress, Validation, best_of, is_over

ROUNDING = ".rounding"
"""Behind the name of the output."""
SAVE_SECONDS = 60.0
"""Between two states, at least: at real shape one takes 8 GB."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@contextmanager
def learned_codes(
    plan: Plan,
    draft: LoadedDraft,
    traces: TraceFolder,
    out: Path,
    *,
    num_draft_tokens: int,
    static: StaticScales | None = None,
    settings: LearningSettings | None = None,
    save_seconds: float = SAVE_SECONDS,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
) -> Iterator[LearnedCodes]:
    """Learn codes and scales, beside the output that they are for.

    What is learned lies in `out` + ".rounding" until the block is left without an exception: a run
    that is cut short goes on there when it is called with the same arguments, and ends with the
    same bytes as one that was not (on a CPU; a GPU adds up in another order each time).

    Args:
        plan: of this draft; its recipe says format, where scales start, and how inputs are rounded.
        draft: unquantized, computing in float32; on a GPU products are of BF16.
        traces: recorded for calibration, not the ones that the gate judges on.
        out: the folder that the codes are for; nothing is written into it here.
        num_draft_tokens: K, as it will be served.
        static: scales of inputs that will be stored; needed where the recipe stores any.
        settings: None = the defaults.
        save_seconds: at least between two states on the disk.
        on_progress: called after every step.

    Yields:
        The codes, for `quantize_draft`; readable while the block lasts.

    Raises:
        BackendError: the recipe's backend or format has no learned rounding.
        OutputError: the output exists already, another run was begun for it or is at it, or nothing
            can be written.
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, there are too few prompts or no input
            scales, the draft computes NaN or infinity, or what was kept is damaged.
    """
    settings = settings or LearningSettings()
    _check(plan, out, draft, traces, num_draft_tokens, static)
    split = split_prompts(
        traces, num_draft_tokens, share=settings.validation_share, seed=settings.seed
    )
    folder = out.with_name(out.name + ROUNDING)
    described = {
        "recipe": recipe_sha256(plan.recipe),
        "draft": _weights_sha256(draft),
        "traces": traces.sha256,
        "num_draft_tokens": num_draft_tokens,
        "input_scales": {} if static is None else dict(static.scales),
        "settings": asdict(settings),
        "device": draft.device.type,
        "versions": {name: package_version(name) for name in ("draftquant", "torch")},
    }
    with resumable_folder(folder, "rounding", described):
        kept = KeptRounding(folder)
        try:
            validations = kept.validations()
            if not validations or not is_over(validations, settings):
                balanced = balanced_draft(draft, plan)
                learning = Learning(
                    balanced,
                    first_latents(plan, balanced),
                    served_rounding(plan, static, draft.device),
                    traces,
                    split,
                    num_draft_tokens=num_draft_tokens,
                    settings=settings,
                    kept=kept,
                    others=nearest_weights(plan, balanced),
                )
                validations = learning.run(
                    validations, save_seconds=save_seconds, on_progress=on_progress
                )
            yield LearnedCodes(
                kept=kept,
                origin=_origin(traces, num_draft_tokens, split, settings, validations),
                validations=validations,
                prompts=frozenset(prompt for _, prompt in traces.prompt_sha256s()),
                group_sizes={
                    _canonical(step): plan.format_of(step).weights.group_size
                    for step in _learned(plan)
                },
            )
        except BaseException:
            if not kept.has_state:  # nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def first_latents(plan: Plan, draft: LoadedDraft) -> dict[str, LatentWeight]:
    """The linears of a plan whose codes are learned, nearest codes first, by canonical module name.

    Args:
        plan: whose recipe says how scales start.
        draft: its weights, balanced as the plan balances them.
    """
    start = get_algorithm(Algorithm(scale=plan.recipe.algorithm.scale, rounding="nearest"))
    largest = _shared_absmax(plan, draft)
    return {
        _canonical(step): LatentWeight(
            _source_weight(step, draft),
            plan.format_of(step).weights,
            start,
            absmax=largest[_canonical(step)],
            device=draft.device,
        )
        for step in _learned(plan)
    }


def nearest_weights(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """What the other quantized linears multiply by, by tensor name: nothing of them is learned.

    Args:
        plan: of several formats, some of which are rounded to the nearest codes.
        draft: as in `first_latents`.
    """
    largest = _shared_absmax(plan, draft)
    found = {}
    for step in plan.quantized:
        recipe = plan.recipe_of(step)
        if recipe.algorithm.rounding == "nearest":
            weight = _source_weight(step, draft)
            rounded = get_algorithm(recipe.algorithm).quantize(
                weight, recipe.weights, absmax=largest[_canonical(step)], moments=None
            )
            found[step.row.canonical] = rounded.dequantized().to(draft.device)
    return found


def _learned(plan: Plan) -> list[Step]:
    """The steps whose codes are learned."""
    return [s for s in plan.quantized if plan.recipe_of(s).algorithm.rounding == "learned"]


def _shared_absmax(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """The largest magnitude of each linear and of those that engines fuse with it, [1, 1]."""
    shared: dict[tuple[str, str], torch.Tensor] = {}
    for step in plan.quantized:
        largest = draft.weights[step.row.canonical].abs().amax().float().cpu().reshape(1, 1)
        group = fused_group(_canonical(step))
        shared[group] = torch.maximum(shared.get(group, largest), largest)
    return {_canonical(step): shared[fused_group(_canonical(step))] for step in plan.quantized}


def _source_weight(step: Step, draft: LoadedDraft) -> torch.Tensor:
    """As it is stored, on the CPU."""
    return draft.weights[step.row.canonical].to("cpu", _DTYPES[step.row.tensor.dtype])


def _canonical(step: Step) -> str:
    return step.row.canonical.removesuffix(".weight")


def _check(
    plan: Plan,
    out: Path,
    draft: LoadedDraft,
    traces: TraceFolder,
    num_draft_tokens: int,
    static: StaticScales | None,
) -> None:
    """Before any work."""
    recipe = plan.recipe
    check_output(out, plan.draft.checkpoint.folder, needed_bytes=plan.bytes_after)
    check_backends(recipe)
    if recipe.algorithm.rounding != "learned":
        raise BackendError(
            f"recipe {recipe.name}",
            f"expected rounding: learned, got {recipe.algorithm}",
            fix="give the recipe with 'rounding: learned' (--algorithm learned)",
        )
    fault = num_draft_tokens_fault(draft.geometry, num_draft_tokens)
    if fault:
        raise CalibrationError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
    check_trace_fits(draft, traces)
    if recipe.needs_input_scales and static is None:
        raise CalibrationError(
            f"recipe {recipe.name}",
            "inputs are rounded under static scales while codes are learned, and none are given",
            fix="measure them on the traces first (`measured_inputs`)",
        )


def _origin(
    traces: TraceFolder,
    num_draft_tokens: int,
    split: PromptSplit,
    settings: LearningSettings,
    validations: tuple[Validation, ...],
) -> LearnedRounding:
    first, best = validations[0], best_of(validations, settings)
    return LearnedRounding(
        traces_sha256=traces.sha256,
        num_draft_tokens=num_draft_tokens,
        steps=settings.steps,
        sequences=settings.sequences,
        seed=settings.seed,
        validation_prompts=len(split.held_back),
        kept_step=best.step,
        acceptance_length=best.acceptance_length,
        overlap=best.overlap,
        acceptance_length_before=first.acceptance_length,
        overlap_before=first.overlap,
        acceptance_length_unquantized=first.unquantized,
    )


def _weights_sha256(draft: LoadedDraft) -> str:
    """Of everything that the draft computes with."""
    digest = hashlib.sha256()
    for name, weight in sorted(draft.weights.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
