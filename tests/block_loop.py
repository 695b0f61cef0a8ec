"""Greedy speculative decoding with a block draft, as an engine does it; see engine_loop.py.

Nothing of `calibration/` or `validate/` is used here. The draft's cache holds the context of the
committed positions whose features are known; a block is drafted behind it and its rows are cropped.
"""

from collections.abc import Sequence
from typing import Any

import torch
from engine_loop import CachedTarget, EngineRun
from reference_dflash import ReferenceDFlash, ReferenceDSpark


@torch.no_grad()
def speculative_block_decode(
    model: Any,
    draft: ReferenceDFlash | ReferenceDSpark,
    prompt: Sequence[int],
    *,
    aux_layer_ids: Sequence[int],
    num_draft_tokens: int,
    num_tokens: int,
) -> EngineRun:
    """Decode until at least `num_tokens` tokens, prompt included, are committed."""
    target = CachedTarget(model, aux_layer_ids)
    with target.hooks:
        top1, features = target.feed(prompt)
        committed, steps = [*prompt, top1[-1]], []
        while len(committed) < num_tokens:
            anchor = len(committed) - 1  # features are known for the positions before it
            draft.extend(features[None])
            drafted = draft.draft(committed[-1], num_draft_tokens)
            top1, verified = target.feed([committed[-1], *drafted])
            accepted = 0
            while accepted < len(drafted) and drafted[accepted] == top1[accepted]:
                accepted += 1
            committed += [*drafted[:accepted], top1[accepted]]
            features = verified[: accepted + 1]
            target.crop(len(committed) - 1)
            steps.append((anchor - 1, accepted))
    return EngineRun(tuple(committed), tuple(steps))
