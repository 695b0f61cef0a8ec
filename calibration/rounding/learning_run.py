"""A run of learning, kept beside the output that it is for.

Memory, for P weights that are learned, beside the draft as it is stored: latents, two moments and
a gradient, 16 P bytes; codes times scales, their gradient and what the straight-through estimators
hold, another 16 P; and the passes of one trace. Logits are held for some rows only. That is 25 to
30 GB for the 0.7 G weights of a Kimi draft. On the disk the state takes 12 P bytes.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftForward, OnInput, checked_at_the_end
from ...quantize.files.provenance import LearnedRounding
from ...quantize.files.result_cache import resumable_folder
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import CalibrationError
from ...recipes.packages import package_version
from ..passes.draft_inputs import MAX_TOKENS, check_trace_fits
from ..passes.proposals import num_draft_tokens_fault
from ..traces.manifest import TraceEntry
from ..traces.near_duplicates import seen_prompts
from ..traces.trace_folder import TraceFolder
from .latents import Latent, LatentOptimiser
from .learned_state import (
    KeptRounding,
    LearnedCodes,
    LearningProgress,
    LearningSettings,
    Validation,
    best_of,
    is_over,
)
from .proposal_divergence import Agreement, DepthWeights, agreement, backward_of_divergence
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

# Every step runs a few traces together through the draft as its codes stand, inputs rounded as
# served, and through the unquantized draft on the same tokens, each along its own hidden states.
# The gradient of the loss moves latents and scales. Now and then the prompts that were held back
# say how many tokens the codes would have accepted; the best such codes are kept.

MAX_LEARNED_TOKENS = 2048
"""Of prompts that learn together, with what shorter ones are filled up with: they have a graph."""


class Learning:
    """One run: the draft over the latents of its linears, and the draft without them."""

    def __init__(
        self,
        draft: LoadedDraft,
        latents: Mapping[str, Latent],
        rounding: OnInput,
        traces: TraceFolder,
        split: PromptSplit,
        *,
        num_draft_tokens: int,
        settings: LearningSettings,
        kept: KeptRounding,
        others: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.draft, self._latents, self._rounding = draft, latents, rounding
        self._others = others
        self.split, self._kept = split, kept
        self._reader = SequenceReader(draft, traces)
        self._num_draft_tokens, self._settings = num_draft_tokens, settings
        self._per_row = 1 if draft.geometry.block_size is None else 1 + num_draft_tokens
        self._optimiser = LatentOptimiser(latents, settings)
        self.reference = draft.family.forward(draft.geometry, draft.weights, lambda _name, x: x)

    def run(
        self,
        validations: tuple[Validation, ...],
        *,
        save_seconds: float,
        on_progress: Callable[[LearningProgress], None],
    ) -> tuple[Validation, ...]:
        """All steps that are left after what is kept, of which the best one's codes are kept."""
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
        """One step of the optimiser; returns the loss before it."""
        settings = self._settings
        served = self.served()
        # Leaves of their own: the passes of each batch go backward and are forgotten at once.
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
                    weights=DepthWeights(decay=settings.depth_decay, missed=settings.missed_weight),
                    share=1 / settings.sequences,
                )
                for _, sequences in self._batches(chosen, rows, MAX_LEARNED_TOKENS)
            ]
        gradients = [leaf.grad for leaf in leaves.values()]
        self._optimiser.step(step, list(served.values()), gradients)
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def validated(self, step: int) -> Validation:
        """What the codes as they stand give on the prompts that were held back."""
        forward = self.forward(self.served())
        prompts = self.split.held_back
        rows = [validation_rows(x, self._num_draft_tokens, self._per_row) for x in prompts]
        found: dict[int, Agreement] = {}
        for batch, sequences in self._batches(prompts, rows, MAX_TOKENS):
            with checked_at_the_end(), self._precision():
                agreements = agreement(
                    forward, self.reference, sequences, num_draft_tokens=self._num_draft_tokens
                )
            found |= zip(batch, agreements, strict=True)
        looks = [found[i] for i in range(len(prompts))]
        total = reduce(add, looks)
        return Validation(
            step=step,
            rows=tuple(one.rows for one in looks),
            accepted=tuple(one.accepted for one in looks),
            overlap=total.overlap / (total.rows * self._num_draft_tokens),
            unquantized=1 + total.accepted_reference / total.rows,
        )

    def _batches(
        self, entries: Sequence[TraceEntry], rows: Sequence[range], max_tokens: int
    ) -> Iterator[tuple[list[int], LearningSequences]]:
        """Prompts that run together, by their positions."""
        for batch in run_together(entries, rows, max_tokens=max_tokens):
            yield batch, self._reader.read([entries[i] for i in batch], [rows[i] for i in batch])

    def served(self) -> dict[str, Tensor]:
        """The linears that learn as they stand, by tensor name, with a graph behind them."""
        return {f"{name}.weight": x.dequantized() for name, x in self._latents.items()}

    def forward(self, served: Mapping[str, Tensor]) -> DraftForward:
        """The draft over some weights in place of its own, inputs rounded."""
        weights = {**self.draft.weights, **self._others, **served}
        return self.draft.family.forward(self.draft.geometry, weights, self._rounding)

    def _precision(self) -> torch.autocast:
        """On a GPU products are of BF16; latents, norms and the loss are not."""
        device = self.draft.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


ROUNDING = ".rounding"
"""Behind the name of the output."""
SAVE_SECONDS = 60.0
"""Between two states, at least: at real shape one takes 8 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """What is learned from what; the draft is unquantized and computes in float32."""

    draft: LoadedDraft
    traces: TraceFolder
    num_draft_tokens: int
    settings: LearningSettings
    what: Mapping[str, Any]
    group_sizes: Mapping[str, int | None]

    def check(self) -> None:
        """Fail unless the draft can learn from the traces."""
        fault = num_draft_tokens_fault(self.draft.geometry, self.num_draft_tokens)
        if fault:
            raise CalibrationError(f"{self.draft.name}: num_draft_tokens", fault[0], fix=fault[1])
        check_trace_fits(self.draft, self.traces)

    def split(self) -> PromptSplit:
        """The prompts to learn from, and those to judge by."""
        settings = self.settings
        return split_prompts(
            self.traces,
            self.num_draft_tokens,
            share=settings.validation_share,
            seed=settings.seed,
        )


class Start(NamedTuple):
    """Where learning starts; `others` is what linears that do not learn multiply by instead."""

    draft: LoadedDraft
    latents: Mapping[str, Latent]
    rounding: OnInput
    others: Mapping[str, torch.Tensor] = MappingProxyType({})


@contextmanager
def learned_beside(
    out: Path,
    task: LearningTask,
    start: Callable[[], Start],
    *,
    save_seconds: float = SAVE_SECONDS,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
) -> Iterator[LearnedCodes]:
    """Learn, or go on where it was left.

    What is learned lies in `out` + ".rounding" until the block is left without an exception: a run
    that is cut short goes on there when it is called with the same arguments, and ends with the
    same bytes as one that was not (on a CPU; a GPU adds up in another order each time).
    """
    split = task.split()
    folder = rounding_folder(out)
    described = {
        **task.what,
        "draft": _weights_sha256(task.draft),
        "traces": task.traces.sha256,
        "num_draft_tokens": task.num_draft_tokens,
        "settings": asdict(task.settings),
        "device": task.draft.device.type,
        "versions": {name: package_version(name) for name in ("draftquant", "torch")},
    }
    with resumable_folder(folder, "rounding", described):
        kept = KeptRounding(folder)
        try:
            validations = kept.validations()
            if not validations or not is_over(validations, task.settings):
                begun = start()
                learning = Learning(
                    begun.draft,
                    begun.latents,
                    begun.rounding,
                    task.traces,
                    split,
                    others=begun.others,
                    num_draft_tokens=task.num_draft_tokens,
                    settings=task.settings,
                    kept=kept,
                )
                validations = learning.run(
                    validations, save_seconds=save_seconds, on_progress=on_progress
                )
            yield LearnedCodes(
                kept=kept,
                origin=_origin(task, split, validations),
                validations=validations,
                prompts=seen_prompts(task.traces),
                group_sizes=task.group_sizes,
            )
        except BaseException:
            if not kept.has_state:  # nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def rounding_folder(out: Path) -> Path:
    """Where what is learned for an output lies until that is complete."""
    return out.with_name(out.name + ROUNDING)


def _origin(
    task: LearningTask, split: PromptSplit, validations: tuple[Validation, ...]
) -> LearnedRounding:
    settings = task.settings
    first, best = validations[0], best_of(validations, settings)
    return LearnedRounding(
        traces_sha256=task.traces.sha256,
        num_draft_tokens=task.num_draft_tokens,
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
