"""The loop over steps of learning, and what is looked at between them.

Every step runs a few traces together through the draft as its codes stand, inputs rounded as
served, and through the unquantized draft on the same tokens, each along its own hidden states. The
gradient of the loss moves latents and scales. Now and then the prompts that were held back say how
many tokens the codes would have accepted; the best such codes are kept.

Memory, for P weights that are learned, beside the draft as it is stored: latents, two moments and
a gradient, 16 P bytes; codes times scales, their gradient and what the straight-through estimators
hold, another 16 P; and the passes of one trace. Logits are held for some rows only. That is 25 to
30 GB for the 0.7 G weights of a Kimi draft. On the disk the state takes 12 P bytes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from types import MappingProxyType

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftForward, OnInput, checked_at_the_end
from ...quantize.stored.loading import LoadedDraft
from ..passes.draft_inputs import MAX_TOKENS
from ..traces.manifest import TraceEntry
from ..traces.trace_folder import TraceFolder
from .latents import Latent, LatentOptimiser
from .learned_state import (
    KeptRounding,
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
    training_rows,
    validation_rows,
)

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
