"""Learning the codes of a plan, beside the output that they are for."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from ...quantize.algorithms import InputMoments, row_algorithm
from ...quantize.drafts.engine_traits import fused_group
from ...quantize.files.staging import check_output
from ...quantize.making.preparing import check_backends
from ...quantize.planning.quantization_plan import Plan, Step
from ...quantize.stored.loading import LoadedDraft
from ...quantize.stored.online_rounding import InputRounding
from ...recipes.errors import BackendError, CalibrationError
from ...recipes.schema import Algorithm, Recipe, RoundingChoice, recipe_sha256
from ..linear_inputs.plan_inputs import MomentsAlongTraces, corrected_linears, served_rounding
from ..linear_inputs.static_scales import StaticScales, balanced_draft
from ..traces.trace_folder import TraceFolder
from .latents import LatentNorm, LatentWeight
from .learned_state import LearnedCodes, LearningProgress, LearningSettings
from .learning_run import SAVE_SECONDS, LearningTask, Start, learned_beside

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
    on_measuring: Callable[[int, int], None] = lambda _done, _total: None,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
) -> Iterator[LearnedCodes]:
    """Learn codes and scales, beside the output that they are for; readable while the block lasts.

    The draft is unquantized and computes in float32; on a GPU products are of BF16. At least
    `save_seconds` pass between two states on the disk.

    Raises:
        BackendError: the recipe's backend or format has no learned rounding.
        OutputError: the output exists already, another run was begun for it or is at it, or nothing
            can be written.
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, there are too few prompts or no input
            scales, the draft computes NaN or infinity, or what was kept is damaged.
    """
    task = LearningTask(
        draft=draft,
        traces=traces,
        num_draft_tokens=num_draft_tokens,
        settings=settings or LearningSettings(),
        what={
            "recipe": recipe_sha256(plan.recipe),
            "input_scales": {} if static is None else dict(static.scales),
        },
        group_sizes={
            canonical(step): plan.format_of(step).weights.group_size for step in learned_steps(plan)
        },
    )
    _check(plan, out, task, static)

    def start() -> Start:
        balanced = balanced_draft(draft, plan)
        rounding = served_rounding(plan, static, draft.device)
        with _moments(plan, task, balanced, rounding, on_measuring) as moments:
            latents = first_latents(plan, balanced, moments)
        return Start(
            draft=balanced,
            latents={**latents, **latent_norms(plan, balanced)},
            rounding=rounding,
            others=nearest_weights(plan, balanced),
        )

    with learned_beside(
        out, task, start, save_seconds=save_seconds, on_progress=on_progress
    ) as found:
        yield found


@contextmanager
def _moments(
    plan: Plan,
    task: LearningTask,
    draft: LoadedDraft,
    rounding: InputRounding,
    on_progress: Callable[[int, int], None],
) -> Iterator[Mapping[str, InputMoments]]:
    """The inputs of the linears that start corrected for their rounding; there within the block.

    On the prompts that are learned from: those that are held back shall judge the start as well.
    """
    corrected = corrected_linears(plan)
    names = [canonical(step) for step in learned_steps(plan) if canonical(step) in corrected]
    if not names:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="draftquant-moments-") as spool:
        statistics = MomentsAlongTraces(
            draft,
            task.traces.only(task.split().learned),
            num_draft_tokens=task.num_draft_tokens,
            spool=Path(spool),
            rounding=rounding,
            corrected=corrected,
            together=rounding.rounds_alone,
            on_progress=on_progress,
        )
        statistics.measure(names)
        yield statistics.second_moments(names)


def first_latents(
    plan: Plan, draft: LoadedDraft, moments: Mapping[str, InputMoments] = MappingProxyType({})
) -> dict[str, LatentWeight]:
    """The linears of a plan whose codes are learned, as they start, by canonical module name.

    First codes are those of GPTQ where there are moments of their inputs, else the nearest ones.
    """
    scale, largest = plan.recipe.algorithm.scale, _shared_absmax(plan, draft)
    found = {}
    for step in learned_steps(plan):
        known = moments.get(canonical(step))
        rounding: RoundingChoice = "nearest" if known is None else "gptq"
        found[canonical(step)] = LatentWeight(
            stored_weight(step, draft),
            plan.format_of(step).weights,
            row_algorithm(Algorithm(scale=scale, rounding=rounding)),
            absmax=largest[canonical(step)],
            device=draft.device,
            moments=known,
        )
    return found


def latent_norms(plan: Plan, draft: LoadedDraft) -> dict[str, LatentNorm]:
    """The norms of a plan whose weights learn, as they are, by canonical module name."""
    return {
        canonical(step): LatentNorm(stored_weight(step, draft), device=draft.device)
        for step in plan.learned_norms
    }


def nearest_weights(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """What the other quantized linears multiply by, by tensor name: nothing of them is learned."""
    largest = _shared_absmax(plan, draft)
    found = {}
    for step in plan.quantized:
        recipe = plan.recipe_of(step)
        if recipe.algorithm.rounding == "nearest":
            rounded = row_algorithm(recipe.algorithm).quantize(
                stored_weight(step, draft), recipe.weights, absmax=largest[canonical(step)],
                moments=None,
            )  # fmt: skip
            found[step.row.canonical] = rounded.dequantized().to(draft.device)
    return found


def learned_steps(plan: Plan) -> list[Step]:
    """The linears whose codes are learned: those of eight bits are rounded to the nearest ones."""
    return [s for s in plan.quantized if plan.recipe_of(s).algorithm.rounding != "nearest"]


def stored_weight(step: Step, draft: LoadedDraft) -> torch.Tensor:
    """The weight of a module on the CPU, in the dtype in which the source has it."""
    return draft.weights[step.row.canonical].to("cpu", _DTYPES[step.row.tensor.dtype])


def canonical(step: Step) -> str:
    """The name of a module."""
    return step.row.canonical.removesuffix(".weight")


def _shared_absmax(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """The largest magnitude of each linear and of those that engines fuse with it, [1, 1]."""
    shared: dict[tuple[str, str], torch.Tensor] = {}
    for step in plan.quantized:
        largest = draft.weights[step.row.canonical].abs().amax().float().cpu().reshape(1, 1)
        group = fused_group(canonical(step))
        shared[group] = torch.maximum(shared.get(group, largest), largest)
    return {canonical(step): shared[fused_group(canonical(step))] for step in plan.quantized}


def _check_recipe(recipe: Recipe) -> None:
    """Fail unless codes of its formats can be learned, and are to be."""
    check_backends(recipe)
    if recipe.algorithm.rounding != "learned":
        raise BackendError(
            f"recipe {recipe.name}",
            f"expected rounding: learned, got {recipe.algorithm}",
            fix="give the recipe with 'rounding: learned'",
        )


def _check(plan: Plan, out: Path, task: LearningTask, static: StaticScales | None) -> None:
    """Before any work."""
    check_output(out, plan.draft.checkpoint.folder, needed_bytes=plan.bytes_after)
    _check_recipe(plan.recipe)
    task.check()
    if plan.recipe.needs_input_scales and static is None:
        raise CalibrationError(
            f"recipe {plan.recipe.name}",
            "learning rounds the inputs under static scales, but no scales are given",
            fix="measure them on the traces first (`measured_inputs`)",
        )
