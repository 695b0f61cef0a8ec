"""The answers in a text: what the target is said to have written, and whether it did.

A run of the loss mask is an answer, whatever comes between two of them. argmax(head(norm?(h))) is
the next token wherever the target chose it. Last states are tried as they are and after the last
norm, each as the state of its row's token, of the one before and of the one after it; the
reading that reproduces most answers is the dump's.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from ...recipes.brief import apart
from ...recipes.errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.head_agreement import MIN_AGREEMENT, normalized
from ..traces.target_tables import FINAL_NORM, HEAD, SharedTables
from .dump_layouts import Sample

SHIFTS = (-1, 0, 1)  # row i holds the state after token i + shift
MAX_ROWS = 256  # of an answer, evenly spaced
NEAR_TIE = 0.25
"""Nats. A text was written token by token, and dumped by one pass over it: in BF16 the two differ
by 0.06 on the shipped targets, and on larger ones by some tenths."""
_OFF_POLICY = 0.3  # others' text is reproduced by half or more, wrong tokens hardly

_NORMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "after the last norm": lambda hidden, _norm: hidden,
        "before the last norm": lambda hidden, norm: normalized(hidden) * norm,
        "before the last norm, 1 + its weights": lambda hidden, norm: (
            normalized(hidden) * (1 + norm)
        ),
    }
)
"""Where states may have been taken -> how the head reads them, with the norm's weight [W]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Tokens `start` to `stop` - 1 of a sample, with the earlier tokens as their prompt."""

    id: str
    category: str
    sample: Sample
    start: int
    stop: int
    first_start: int  # of the sample's first answer: the conversation's own prompt


class Answers:
    """Finds the answers of samples; tokens after one of `ends` in the mask do not belong to them.

    A sample belongs to the longest of `prompts`, the dump's prompts, that it begins with.
    """

    def __init__(self, ends: Collection[int], prompts: Sequence[Prompt] | None) -> None:
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._prompts: Mapping[tuple[int, ...], Prompt] | None = (
            None if prompts is None else {prompt.token_ids: prompt for prompt in prompts}
        )
        self._lengths = sorted({len(ids) for ids in self._prompts or ()}, reverse=True)
        self._taken: set[str] = set()

    def of(self, sample: Sample) -> Iterator[Answer]:
        """The answers of one sample, in order; none where no answer has a token."""
        prompt = self._prompt_of(sample)
        runs = self._runs(sample, prompt)
        name = sample.id if prompt is None else prompt.id
        if name in self._taken:
            name = f"{name}/{sample.id}"
        self._taken.add(name)
        for turn, (start, stop) in enumerate(runs, start=1):
            yield Answer(
                id=f"{name}/turn-{turn}" if len(runs) > 1 else name,
                category=prompt.category if prompt else "all",
                sample=sample,
                start=start,
                stop=stop,
                first_start=runs[0][0],
            )

    def _runs(self, sample: Sample, prompt: Prompt | None) -> list[tuple[int, int]]:
        answered, count = sample.answered, len(sample.token_ids)
        if answered is not None and not bool(answered.any()):
            return []
        if answered is None or bool(answered[0]):
            if prompt is None:
                why = "has no loss mask" if answered is None else "begins with an answer"
                raise TraceError(
                    sample.file,
                    f"the text {why}, so it is unknown where its prompt ends",
                    fix="give the prompts as they were sent, with their token ids: --prompts P",
                )
            answered = torch.arange(count) >= len(prompt.token_ids)
        steps = torch.diff(torch.nn.functional.pad(answered.long(), (1, 1)))
        starts, stops = ((steps == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        return [
            (start, self._end(sample, start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _end(self, sample: Sample, start: int, stop: int) -> int:
        """Up to and including the first token that ends an answer."""
        ends = torch.isin(sample.token_ids[start:stop], self._ends).nonzero()
        return start + int(ends[0]) + 1 if len(ends) else stop

    def _prompt_of(self, sample: Sample) -> Prompt | None:
        if self._prompts is None:
            return None
        for length in self._lengths:
            prompt = self._prompts.get(tuple(sample.token_ids[:length].tolist()))
            if prompt is not None:
                return prompt
        raise TraceError(
            sample.file,
            "the text begins with none of the prompts of --prompts",
            fix="give the prompts that were sent, with the same token ids: --prompts P",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFinding:
    """Where dumped last states were taken, in words, and their shift."""

    norm: str
    shift: int
    share: float  # of positions whose token is reproduced, in [0, 1]


class TargetHead:
    """The head [V, W] and the weight [W] of the norm before it, in float32."""

    def __init__(self, tables: SharedTables) -> None:
        self._head = tables[HEAD].float()
        self._norm = tables[FINAL_NORM].float()

    def settle(self, answers: Sequence[tuple[Answer, Tensor]]) -> HeadFinding:
        """How the head reproduces answers to 98 %, each given with its last states [N, W]."""
        shares = {
            reading: [self.share(answer, last, *reading) for answer, last in answers]
            for reading in product(_NORMS, SHIFTS)
        }
        best = max(shares, key=lambda r: (_reproduced(shares[r]), sum(shares[r])))
        share = sum(shares[best]) / len(answers)
        if not _reproduced(shares[best]):
            norm, shift = best
            beside = f"shifted by {shift:+d} token" if shift else "at the positions of their tokens"
            probably = (
                "the text comes from a data set, or was sampled"
                if share >= _OFF_POLICY
                else "the tokens are those of another tokenizer, or the states those of another"
                " target"
            )
            raise TraceError(
                answers[0][0].sample.file.parent,
                f"the target wrote none of the {len(answers)} answers: at best, its head predicts"
                f" {apart(share, MIN_AGREEMENT, '.0%')} of their tokens (with the states {norm},"
                f" {beside}), expected {MIN_AGREEMENT:.0%}. Probably {probably}",
                fix="dump the target's own greedy answers, and give the target that was dumped",
            )
        return HeadFinding(norm=best[0], shift=best[1], share=share)

    def share(self, answer: Answer, last: Tensor, norm: str, shift: int) -> float:
        """Share of an answer's tokens that the head predicts, near ties too; 0 for no tokens."""
        positions = torch.arange(max(answer.start, 1), answer.stop)
        rows = positions - 1 - shift
        positions = positions[(rows >= 0) & (rows < len(last))]
        positions = positions[:: -(-len(positions) // MAX_ROWS) or 1]
        if not len(positions):
            return 0.0
        hidden = _NORMS[norm](last[positions - 1 - shift].float(), self._norm)
        logits = hidden @ self._head.T
        chosen = logits.gather(1, answer.sample.token_ids[positions, None])[:, 0]
        return float((logits.amax(dim=1) - chosen <= NEAR_TIE).double().mean())


def _reproduced(shares: Sequence[float]) -> int:
    return sum(share >= MIN_AGREEMENT for share in shares)
