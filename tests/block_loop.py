"""Greedy speculative decoding with a block draft, as an engine does it; see engine_loop.py.

Nothing of `calibration/` or `validate/` is used here. The draft's cache holds the context of the
committed positions whose features are known; a block is drafted behind it and its rows are cropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from engine_loop import CachedTarget, EngineRun
from reference_dflash import ReferenceDFlash
from reference_dspark import ReferenceDSpark

Length = Callable[[list[list[float]]], int]
"""How many drafted tokens a step verifies, of the confidences of every step so far, its own last.
"""


@torch.no_grad()
def speculative_block_decode(
    model: Any,
    draft: ReferenceDFlash | ReferenceDSpark,
    prompt: Sequence[int],
    *,
    aux_layer_ids: Sequence[int],
    num_draft_tokens: int,
    num_tokens: int,
    length: Length | None = None,
) -> EngineRun:
    """Decode until at least `num_tokens` tokens, prompt included, are committed.

    With a `length` (of a draft with a confidence head) the target is fed so many of the drafted
    tokens alone, and the rest of the block is thrown away.
    """
    target = CachedTarget(model, aux_layer_ids)
    with target.hooks:
        top1, features = target.feed(prompt)
        committed, steps = [*prompt, top1[-1]], []
        confidences: list[list[float]] = []
        lengths: list[int] = []
        while len(committed) < num_tokens:
            anchor = len(committed) - 1  # features are known for the positions before it
            draft.extend(features[None])
            drafted = draft.draft(committed[-1], num_draft_tokens)
            if length is not None:
                assert isinstance(draft, ReferenceDSpark)
                logits = torch.tensor(draft.confidence_logits)
                confidences.append(logits.sigmoid().tolist())
                drafted = drafted[: length(confidences)]
            lengths.append(len(drafted))
            top1, verified = target.feed([committed[-1], *drafted])
            accepted = 0
            while accepted < len(drafted) and drafted[accepted] == top1[accepted]:
                accepted += 1
            committed += [*drafted[:accepted], top1[accepted]]
            features = verified[: accepted + 1]
            target.crop(len(committed) - 1)
            steps.append((anchor - 1, accepted))
    return EngineRun(tuple(committed), tuple(steps), tuple(lengths))
