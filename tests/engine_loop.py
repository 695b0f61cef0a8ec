"""Greedy speculative decoding as an engine does it: a real target, real KV caches, round by round.

Nothing of `calibration/` or `validate/` is used here: it is what replay is checked against. After
each verification the target's cache is cropped to the committed tokens, and the draft's to the rows
with true features, from which the rows of the newly committed tokens are computed too.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from draftquant.calibration.recording.target_model import cache_argument
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Committed tokens (prompt first), and per verify step its row and its accepted tokens."""

    token_ids: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]


class CachedTarget:
    """The target with its KV cache and hooks behind the aux layers."""

    def __init__(self, model: PreTrainedModel, aux_layer_ids: Sequence[int]) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.captured: dict[int, Tensor] = {}
        self.ids = tuple(aux_layer_ids)
        self.hooks = ExitStack()
        for i in self.ids:
            self.hooks.callback(model.model.layers[i].register_forward_hook(self._hook(i)).remove)

    def feed(self, token_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """Argmax after each fed token, and their features [t, width]."""
        logits, features = self.read(token_ids)
        return logits.argmax(-1).tolist(), features

    def read(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [t, V] after each fed token, and their features [t, width]."""
        ids = torch.tensor([list(token_ids)])
        kept = {cache_argument(self.model): self.cache}
        logits = self.model(input_ids=ids, use_cache=True, **kept).logits
        return logits[0], torch.cat([self.captured[i][0] for i in self.ids], dim=-1)

    def crop(self, length: int) -> None:
        if length < self.cache.get_seq_length():  # in transformers 5.0, 0 removes all
            self.cache.crop(length - self.cache.get_seq_length())

    def _hook(self, layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self.captured[layer] = output if isinstance(output, Tensor) else output[0]

        return keep


@torch.no_grad()
def speculative_decode(
    model: PreTrainedModel,
    draft: Any,
    prompt: Sequence[int],
    *,
    aux_layer_ids: Sequence[int],
    num_draft_tokens: int,
    num_tokens: int,
) -> EngineRun:
    """Decode until at least `num_tokens` tokens, prompt included, are committed.

    `draft` is one of the independent drafts, of which `drafted` is what an engine does in a round.
    """
    target = CachedTarget(model, aux_layer_ids)
    with target.hooks:
        top1, features = target.feed(prompt)
        committed, steps = [*prompt, top1[-1]], []
        known = 0  # rows of the draft's cache that were computed from true features
        while len(committed) < num_tokens:
            last = len(committed) - 1  # features are known for positions 0 .. last - 1
            drafted = draft.drafted(committed, features, known, num_draft_tokens)
            known = last
            top1, verified = target.feed([committed[-1], *drafted])
            accepted = 0
            while accepted < len(drafted) and drafted[accepted] == top1[accepted]:
                accepted += 1
            committed += [*drafted[:accepted], top1[accepted]]
            features = torch.cat((features, verified[: accepted + 1]))
            target.crop(len(committed) - 1)
            steps.append((last - 1, accepted))
    return EngineRun(tuple(committed), tuple(steps))
