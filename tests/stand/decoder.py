"""What the stands serve: a shipped pair, decoded speculatively round by round.

Nothing of `calibration/` or `validate/` is used here: figures of the stands are what replay is held
against. Loading the draft's weights is `quantize`'s alone.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from block_pair import shared_tables
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from engine_loop import EngineRun, speculative_decode
from reference_draft import ReferenceDraft
from torch import Tensor
from transformers import AutoModelForCausalLM

PAIR = Path(__file__).parents[1] / "pairs" / "eagle3-llama"
AUX_LAYER_IDS = (0, 1, 2)
END = 0  # the end-of-text token of the shipped targets
_AHEAD = 48  # tokens that a prompt is decoded to at once


@dataclass(frozen=True, slots=True)
class Written:
    """What a prompt got.

    Attributes:
        first: the token that prefill writes.
        rounds: accepted draft tokens of each, of the last one with those beyond the end.
        chunks: tokens of each round that are part of the output.
        ended: by the end-of-text token, or by the length asked for.
    """

    first: int
    rounds: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    ended: Literal["stop", "length"]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.first, *(token for chunk in self.chunks for token in chunk))


def loaded_draft() -> LoadedDraft:
    """The pair's, with the tables that it shares with its target."""
    return load_draft(PAIR / "draft", dtype=torch.float32, shared=shared_tables(PAIR / "target"))


class Decoder:
    """The pair's target and draft; every prompt is decoded once."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
        self._draft = loaded_draft()
        self._runs: dict[tuple[int, ...], EngineRun] = {}
        self._lock = threading.Lock()  # hooks of the target belong to one prompt at a time

    def write(self, prompt: Sequence[int], num_tokens: int, *, ignore_eos: bool) -> Written:
        """Continue a prompt by at most `num_tokens` tokens, which end at the end-of-text token."""
        with self._lock:
            run = self._run(tuple(prompt), num_tokens)
        text = run.token_ids[len(prompt) :]
        rounds: list[int] = []
        chunks: list[tuple[int, ...]] = []
        written, ended = 1, self._ended(text[:1], num_tokens, 1, ignore_eos)
        for _, accepted in run.steps:
            if ended:
                break
            chunk = text[written : written + accepted + 1][: num_tokens - written]
            if END in chunk and not ignore_eos:
                chunk = chunk[: chunk.index(END) + 1]
            rounds.append(accepted)
            chunks.append(chunk)
            written += len(chunk)
            ended = self._ended(chunk, num_tokens, written, ignore_eos)
        assert ended is not None
        return Written(text[0], tuple(rounds), tuple(chunks), ended)

    def logprobs(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """[T, V] of the target at the places of an output."""
        with self._lock, torch.no_grad():
            logits = self._target(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def _run(self, prompt: tuple[int, ...], num_tokens: int) -> EngineRun:
        run = self._runs.get(prompt)
        if run is None or len(run.token_ids) < len(prompt) + num_tokens:
            run = self._runs[prompt] = speculative_decode(
                self._target,
                ReferenceDraft(self._draft.geometry, self._draft.weights),
                prompt,
                aux_layer_ids=AUX_LAYER_IDS,
                num_draft_tokens=self.num_draft_tokens,
                num_tokens=len(prompt) + max(num_tokens, _AHEAD),
            )
        return run

    @staticmethod
    def _ended(
        chunk: Sequence[int], num_tokens: int, written: int, ignore_eos: bool
    ) -> Literal["stop", "length"] | None:
        if END in chunk and not ignore_eos:
            return "stop"
        return "length" if written >= num_tokens else None
