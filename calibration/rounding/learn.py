"""Learning the codes of a plan, beside the output that they are for: the run, and its steps.

Every step runs a few traces through the draft with its current codes, inputs rounded as served, and
through the unquantized draft on the same tokens, each along its own hidden states.

Memory, for P weights that are learned, besides the draft as stored: latents, two moments and
a gradient, 16 P bytes; codes times scales, their gradient and the buffers of straight-through
estimators, another 16 P; and the passes of one trace. That is 25 to 30 GB for a Kimi draft with
0.7 billion weights. On disk the state takes 12 P bytes.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ...quantize.algorithms import InputMoments, row_algorithm
from ...quantize.drafts.forward import DraftForward, OnInput, checked_at_the_end
from ...quantize.files.provenance import LearnedRounding
from ...quantize.files.result_cache import resumable_folder
from ...quantize.files.staging import check_output
from ...quantize.making.preparing import check_backends
from ...quantize.numerics.quantized_weight import TORCH_DTYPES
from ...quantize.planning.quantization_plan import NOTHING_MEASURED, MeasuredInputs, Plan, Step
from ...quantize.stored.loading import LoadedDraft
from ...quantize.stored.online_rounding import InputRounding
from ...recipes.errors import BackendError, CalibrationError
from ...recipes.listener import Progress, unseen
from ...recipes.packages import package_version
from ...recipes.schema import Algorithm, RoundingChoice, recipe_sha256
from ..linear_inputs.plan_inputs import MomentsAlongTraces, corrected_linears, served_rounding
from ..linear_inputs.static_scales import balanced_run
from ..passes.draft_inputs import MAX_TOKENS, DraftRun
from ..traces.held_out import seen_prompts
from ..traces.manifest import TraceEntry
from .latents import Latent, LatentNorm, LatentOptimiser, LatentWeight
from .learned_state import (
    KeptRounding,
    LearnedCodes,
    LearningProgress,
    LearningSettings,
    Validation,
    best_of,
    is_over,
)
from .proposal_divergence import Agreement, agreement, backward_of_divergence
from .sequences import (
    LearningSequences,
    PromptSplit,
    SequenceReader,
    chosen_prompts,
    run_together,
    split_prompts,
    training_rows,
    validation_rows,
)

MAX_LEARNED_TOKENS = 2048
"""Tokens of prompts that learn together, padding included: they have a graph."""


class Learning:
    """One run: the draft over the latents of its linears, and the draft without them."""

    def __init__(
        self,
        run: DraftRun,
        latents: Mapping[str, Latent],
        rounding: OnInput,
        split: PromptSplit,
        *,
        settings: LearningSettings,
        kept: KeptRounding,
        others: Mapping[str, Tensor],
    ) -> None:
        draft = self.draft = run.draft
        self._latents, self._rounding = latents, rounding
        self._others = others
        self.split, self._kept = split, kept
        self._reader = SequenceReader(draft, run.traces)
        self._num_draft_tokens, self._settings = run.num_draft_tokens, settings
        self._per_row = 1 if draft.geometry.block_size is None else 1 + run.num_draft_tokens
        self._optimiser = LatentOptimiser(latents, settings)
        self.reference = draft.family.forward(draft.geometry, draft.weights, lambda _name, x: x)

    def run(
        self,
        validations: tuple[Validation, ...],
        *,
        save_seconds: float,
        on_progress: Callable[[LearningProgress], None],
    ) -> tuple[Validation, ...]:
        """Run the remaining steps; keep the codes of the best one."""
        settings = self._settings
        if validations:
            kept = self._kept.tensors(self._optimiser.tensors())
            self._optimiser.restore(validations[-1].step, kept)
        else:
            validations = (self.validated(0),)
            self._keep_codes(0)
        saved = time.monotonic()
        for step in range(validations[-1].step + 1, settings.steps + 1):
            loss = self._step(step - 1)
            if step % settings.validate_every == 0 or step == settings.steps:
                validations = (*validations, self.validated(step))
                if best_of(validations, settings).step == step:
                    self._keep_codes(step)
            best, over = best_of(validations, settings), is_over(validations, settings)
            if validations[-1].step == step and (over or time.monotonic() - saved >= save_seconds):
                self._kept.save({} if over else self._optimiser.tensors(), validations)
                self._kept.remove_codes_but(best.step)
                saved = time.monotonic()
            on_progress(
                LearningProgress(
                    step=step,
                    steps=settings.steps,
                    loss=loss,
                    validation=validations[-1],
                    best=best,
                )
            )
            if over:
                break
        return validations

    def _keep_codes(self, step: int) -> None:
        codes = {name: latent.parts() for name, latent in self._latents.items()}
        self._kept.save_codes(step, codes)

    def _step(self, step: int) -> float:
        settings = self._settings
        served = self.served()
        # Separate leaves: the passes of each batch go backward and are freed at once.
        leaves = {name: weight.detach().requires_grad_() for name, weight in served.items()}
        forward = self.forward(leaves)
        chosen = list(
            chosen_prompts(self.split.learned, step, count=settings.sequences, seed=settings.seed)
        )
        draw = f"{settings.seed}:{step}"
        rows = [training_rows(x, self._num_draft_tokens, self._per_row, draw) for x in chosen]
        with checked_at_the_end(), self._precision():
            losses = [
                backward_of_divergence(
                    forward,
                    self.reference,
                    sequences,
                    num_draft_tokens=self._num_draft_tokens,
                    settings=settings,
                    share=1 / settings.sequences,
                )
                for _, sequences in self._batches(chosen, rows, MAX_LEARNED_TOKENS)
            ]
        gradients = [leaf.grad for leaf in leaves.values()]
        self._optimiser.step(step, list(served.values()), gradients)
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def validated(self, step: int) -> Validation:
        """What the current codes give on the prompts that were held out."""
        forward = self.forward(self.served())
        prompts = self.split.held_back
        rows = [validation_rows(x, self._num_draft_tokens, self._per_row) for x in prompts]
        by_prompt: dict[int, Agreement] = {}
        for batch, sequences in self._batches(prompts, rows, MAX_TOKENS):
            with checked_at_the_end(), self._precision():
                agreements = agreement(
                    forward, self.reference, sequences, num_draft_tokens=self._num_draft_tokens
                )
            by_prompt |= zip(batch, agreements, strict=True)
        looks = [by_prompt[i] for i in range(len(prompts))]
        num_rows = sum(look.rows for look in looks)
        return Validation(
            step=step,
            rows=tuple(look.rows for look in looks),
            accepted=tuple(look.accepted for look in looks),
            overlap=sum(look.overlap for look in looks) / (num_rows * self._num_draft_tokens),
            unquantized=1 + sum(look.accepted_reference for look in looks) / num_rows,
        )

    def _batches(
        self, entries: Sequence[TraceEntry], rows: Sequence[range], max_tokens: int
    ) -> Iterator[tuple[list[int], LearningSequences]]:
        for batch in run_together(entries, rows, max_tokens=max_tokens):
            yield batch, self._reader.read([entries[i] for i in batch], [rows[i] for i in batch])

    def served(self) -> dict[str, Tensor]:
        """The current values of the linears that learn, by tensor name, with an autograd graph."""
        return {f"{name}.weight": x.dequantized() for name, x in self._latents.items()}

    def forward(self, served: Mapping[str, Tensor]) -> DraftForward:
        """The draft with some weights replaced, inputs rounded."""
        weights = {**self.draft.weights, **self._others, **served}
        return self.draft.family.forward(self.draft.geometry, weights, self._rounding)

    def _precision(self) -> torch.autocast:
        """On a GPU products are in BF16; latents, norms and the loss are not."""
        device = self.draft.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


ROUNDING = ".rounding"
"""Suffix of the output's name: the folder of learned state until learning is complete."""
SAVE_SECONDS = 60.0  # between two states, at least: at real shape one takes 8 GB


@contextmanager
def learned_codes(
    plan: Plan,
    run: DraftRun,
    out: Path,
    *,
    static: MeasuredInputs = NOTHING_MEASURED,
    settings: LearningSettings | None = None,
    save_seconds: float = SAVE_SECONDS,
    on_measuring: Progress = unseen,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
) -> Iterator[LearnedCodes]:
    """Learn codes and scales, beside the output that they are for; readable while the block lasts.

    The draft is unquantized and computes in float32; on a GPU products are in BF16. What is learned
    is in `out` + ".rounding" until the block is left without an exception: an interrupted
    run resumes there when it is called with the same arguments, and ends with the same bytes as
    an uninterrupted one (on a CPU; a GPU adds up in another order each time).
    """
    settings = settings or LearningSettings()
    check_output(out, plan.draft.checkpoint.folder, needed_bytes=plan.bytes_after)
    _check(plan, run, static)
    draft, traces, num_draft_tokens = run.draft, run.traces, run.num_draft_tokens
    split = split_prompts(
        traces, num_draft_tokens, share=settings.validation_share, seed=settings.seed
    )
    folder = out.with_name(out.name + ROUNDING)
    described = {
        "recipe": recipe_sha256(plan.recipe),
        "input_scales": dict(static.input_scales),
        "draft": _weights_sha256(draft),
        "traces": traces.sha256,
        "num_draft_tokens": num_draft_tokens,
        "settings": asdict(settings),
        "device": draft.device.type,
        "versions": {name: package_version(name) for name in ("draftquant", "torch")},
    }
    with resumable_folder(folder, "rounding", described):
        kept, finished = KeptRounding(folder), False
        try:
            validations = kept.validations()
            if not validations or not is_over(validations, settings):
                along = balanced_run(run, plan)
                rounding = served_rounding(plan, static, draft.device)
                # Held-out prompts judge the start as well.
                learned = replace(along, traces=traces.only(split.learned))
                with _moments(plan, learned, rounding, on_measuring) as moments:
                    latents = first_latents(plan, along.draft, moments)
                learning = Learning(
                    along,
                    {**latents, **latent_norms(plan, along.draft)},
                    rounding,
                    split,
                    others=nearest_weights(plan, along.draft),
                    settings=settings,
                    kept=kept,
                )
                validations = learning.run(
                    validations, save_seconds=save_seconds, on_progress=on_progress
                )
            first, best = validations[0], best_of(validations, settings)
            yield LearnedCodes(
                kept=kept,
                origin=LearnedRounding(
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
                ),
                validations=validations,
                prompts=seen_prompts(traces),
                group_sizes={
                    canonical(step): plan.format_of(step).weights.group_size
                    for step in learned_steps(plan)
                },
            )
            finished = True
        finally:
            if finished or not kept.has_state:  # otherwise the next run resumes there
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _moments(
    plan: Plan, run: DraftRun, rounding: InputRounding, on_progress: Progress
) -> Iterator[Mapping[str, InputMoments]]:
    """Input moments of linears that start corrected for rounding; they exist within the block."""
    corrected = corrected_linears(plan)
    names = [canonical(step) for step in learned_steps(plan) if canonical(step) in corrected]
    if not names:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="draftquant-moments-") as spool:
        statistics = MomentsAlongTraces(
            run, spool=Path(spool), rounding=rounding, corrected=corrected, on_progress=on_progress
        )
        statistics.measure(names)
        yield statistics.second_moments(names)


def first_latents(
    plan: Plan, draft: LoadedDraft, moments: Mapping[str, InputMoments] = MappingProxyType({})
) -> dict[str, LatentWeight]:
    """The linears of a plan whose codes are learned, as they start, by canonical module name.

    First codes are those of GPTQ where moments of the inputs are given, else the nearest ones.
    """
    scale, largest = plan.recipe.algorithm.scale, _shared_absmax(plan, draft)
    latents = {}
    for step in learned_steps(plan):
        known = moments.get(canonical(step))
        rounding: RoundingChoice = "nearest" if known is None else "gptq"
        latents[canonical(step)] = LatentWeight(
            stored_weight(step, draft),
            plan.format_of(step).weights,
            row_algorithm(Algorithm(scale=scale, rounding=rounding)),
            absmax=largest[canonical(step)],
            device=draft.device,
            moments=known,
        )
    return latents


def latent_norms(plan: Plan, draft: LoadedDraft) -> dict[str, LatentNorm]:
    """The norms of a plan whose weights learn, in their first state, by canonical module name."""
    return {
        canonical(step): LatentNorm(stored_weight(step, draft), device=draft.device)
        for step in plan.learned_norms
    }


def nearest_weights(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """The values of the other quantized linears, by tensor name: nothing of them is learned."""
    largest = _shared_absmax(plan, draft)
    weights = {}
    for step in plan.quantized:
        recipe = plan.recipe_of(step)
        if recipe.algorithm.rounding == "nearest":
            rounded = row_algorithm(recipe.algorithm).quantize(
                stored_weight(step, draft), recipe.weights, absmax=largest[canonical(step)],
                moments=None,
            )  # fmt: skip
            weights[step.row.canonical] = rounded.dequantized().to(draft.device)
    return weights


def learned_steps(plan: Plan) -> list[Step]:
    """The linears whose codes are learned: those of eight bits are rounded to the nearest ones."""
    return [s for s in plan.quantized if plan.recipe_of(s).algorithm.rounding != "nearest"]


def stored_weight(step: Step, draft: LoadedDraft) -> torch.Tensor:
    """The weight of a module on the CPU, in the dtype in which the source has it."""
    return draft.weights[step.row.canonical].to("cpu", TORCH_DTYPES[step.row.tensor.dtype])


def canonical(step: Step) -> str:
    """The name of a module."""
    return step.row.canonical.removesuffix(".weight")


def _shared_absmax(plan: Plan, draft: LoadedDraft) -> dict[str, torch.Tensor]:
    """The largest magnitude of each linear and of those that engines fuse with it, [1, 1]."""
    shared: dict[tuple[str, str], torch.Tensor] = {}
    group_of = plan.draft.family.scale_group
    for step in plan.quantized:
        largest = draft.weights[step.row.canonical].abs().amax().float().cpu().reshape(1, 1)
        group = group_of(canonical(step))
        shared[group] = torch.maximum(shared.get(group, largest), largest)
    return {canonical(step): shared[group_of(canonical(step))] for step in plan.quantized}


def _check(plan: Plan, run: DraftRun, static: MeasuredInputs) -> None:
    """Check before any work that codes of the recipe's formats can be learned from these traces."""
    recipe = plan.recipe
    check_backends(recipe)
    if recipe.algorithm.rounding != "learned":
        what = f"expected rounding: learned, got {recipe.algorithm}"
        fix = "give the recipe with 'rounding: learned'"
        raise BackendError(f"recipe {recipe.name}", what, fix=fix)
    run.check()
    if recipe.needs_input_scales and not static.input_scales:
        raise CalibrationError(
            f"recipe {recipe.name}",
            "learning rounds the inputs under static scales, but no scales are given",
            fix="measure them on the traces first (`measured_inputs`)",
        )


def _weights_sha256(draft: LoadedDraft) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(draft.weights.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
