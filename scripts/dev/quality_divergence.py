"""How far what a draft proposes lies from what the BF16 draft proposes, along a target's text.

The acceptance length counts whole tokens, so that two drafts differ in it by chance; the divergence
looks at all probabilities, and tells such drafts apart with the same prompts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ...calibration.rounding.sequences import LearningSequences
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft


class Divergence:
    """From one BF16 draft along traces; what it proposes there is computed once.

    Args:
        reference: the BF16 draft.
        traces: as they are counted.
        num_draft_tokens: K.
    """

    def __init__(
        self, reference: "LoadedDraft", traces: "TraceFolder", num_draft_tokens: int
    ) -> None:
        self._reference, self._traces, self._depths = reference, traces, num_draft_tokens
        self._taught: dict[tuple[int, ...], list[Tensor]] = {}

    def mean(self, draft: "LoadedDraft") -> float:
        """KL(BF16 draft ‖ draft) in nats, the mean over every row and depth.

        Raises:
            ForwardError: the draft computes NaN or infinity.
        """
        from ...calibration.passes.batches import batches_of

        total, count = 0.0, 0
        size = None if draft.rounds_alone else 1
        for positions in batches_of(self._traces.manifest.prompts, max_prompts=size):
            key = tuple(positions)
            if key not in self._taught:
                self._taught[key] = list(self._states(self._reference, key))
            for mine, its in zip(self._states(draft, key), self._taught[key], strict=True):
                total += self._sum(draft, mine, its)
                count += mine.shape[0] * mine.shape[1]
        return total / count

    def _sum(self, draft: "LoadedDraft", mine: "Tensor", its: "Tensor") -> float:
        """Over hidden states [n, D, W] of the draft and the reference."""
        import torch

        with torch.inference_mode():
            wanted = self._reference.forward.logits(its).float().log_softmax(-1)
            got = draft.forward.logits(mine).float().log_softmax(-1)
            return float((wanted.exp() * (wanted - got)).sum(dtype=torch.float64))

    def _states(self, draft: "LoadedDraft", positions: tuple[int, ...]) -> Iterator["Tensor"]:
        """[n, D, W] of every pass along some prompts, of the rows that lie inside each."""
        import torch

        from ...calibration.rounding.own_rows import OwnRows

        with torch.inference_mode():
            sequences = self._sequences(draft, positions)
            for one in draft.forward.passes(
                sequences.hidden,
                sequences.token_ids,
                rows=sequences.rows,
                num_draft_tokens=self._depths,
            ):
                yield OwnRows(one, sequences).of(one.hidden)

    def _sequences(self, draft: "LoadedDraft", positions: tuple[int, ...]) -> "LearningSequences":
        from ...calibration.passes.draft_inputs import TraceBatch, first_hidden_of_batch
        from ...calibration.rounding.sequences import LearningSequences
        from ...quantize.drafts.forward import whole_rows

        prompts = self._traces.manifest.prompts
        batch = TraceBatch([self._traces.load(prompts[i]) for i in positions], draft.device)
        own = tuple(
            whole_rows(one.num_tokens, self._depths, first_row=one.prompt_length - 1)
            for one in batch
        )
        return LearningSequences(
            hidden=first_hidden_of_batch(draft, self._traces, batch),
            token_ids=batch.token_ids,
            rows=range(min(one.start for one in own), max(one.stop for one in own)),
            own=own,
        )
