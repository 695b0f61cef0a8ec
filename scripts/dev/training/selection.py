"""Selection of held-out prompts: those that the target continues without looping.

A small target's greedy text likes to loop, loops are easy to draft, and a figure measured on them
says little. The choice looks only at the target, never at a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....validate.counting.acceptance_counts import repeated_ngram_share
from .corpus import Prompt
from .target import greedy_continuations


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedPrompts:
    """Prompts, the target's continuations, and what they were chosen from.

    Attributes:
        prompts: the selected prompts, n of them.
        token_ids: [n, prompt_length + num_new_tokens] int64, prompts and greedy continuations.
        num_candidates: prompts before selection.
        candidates_repeated_8gram_share: pooled share over all candidates' continuations.
    """

    prompts: tuple[Prompt, ...]
    token_ids: Tensor
    num_candidates: int
    candidates_repeated_8gram_share: float


def select_prompts(
    target: PreTrainedModel,
    candidates: Sequence[Prompt],
    *,
    count: int,
    num_new_tokens: int,
    max_repeated_8gram_share: float,
) -> SelectedPrompts:
    """Continue every candidate and keep the first `count` whose continuation does not loop.

    Args:
        max_repeated_8gram_share: limit per continuation, in [0, 1].
    """
    prompt_token_ids = torch.tensor([prompt.token_ids for prompt in candidates])
    token_ids = greedy_continuations(target, prompt_token_ids, num_new_tokens=num_new_tokens)
    continuations = token_ids[:, prompt_token_ids.shape[1] :]
    kept = _unlooped(continuations, max_repeated_8gram_share)
    if len(kept) < count:
        raise _too_few(count, len(kept), len(candidates), max_repeated_8gram_share)
    chosen = kept[:count]
    return SelectedPrompts(
        prompts=tuple(candidates[index] for index in chosen),
        token_ids=token_ids[chosen],
        num_candidates=len(candidates),
        candidates_repeated_8gram_share=repeated_ngram_share(continuations.tolist()),
    )


def _unlooped(continuations: Tensor, limit: float) -> list[int]:
    """Rows of continuations whose share of repeated 8-grams does not exceed the limit."""
    return [
        index
        for index, continuation in enumerate(continuations.tolist())
        if repeated_ngram_share([continuation]) <= limit
    ]


def _too_few(wanted: int, found: int, candidates: int, limit: float) -> ValueError:
    return ValueError(
        f"held-out prompts: expected {wanted} with at most {limit} "
        f"repeated 8-grams, got {found} of {candidates}\n"
        "  fix: train the target longer, draw more candidates, or raise the limit"
    )
