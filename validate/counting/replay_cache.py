"""What the BF16 draft proposes along traces, kept: each further candidate needs it again.

The key is everything that determines a proposal, and an entry is checked each time: the draft
replays some of its prompts, drawn at random. The more prompts a forgery, or the arithmetic of
another machine, has changed, the more surely the check finds it.
"""

import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...calibration.passes.computing import computing
from ...calibration.passes.draft_inputs import proposals_of_batch, rows_along
from ...calibration.passes.proposals import Proposals
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.files.digests import Digest, tensors_sha256
from ...quantize.files.result_cache import ResultCache
from ...quantize.files.safetensors_header import WORKERS
from ...quantize.stored.loading import LoadedDraft

PROMPTS_PER_PROOF = 32
"""One prompt in this many is replayed again: 3 % of a replay, at least one prompt."""

_BLOCK = 2**26  # elements copied from a device at a time


@dataclass(frozen=True, kw_only=True)
class ReplayQuestion:
    """What a draft is asked; nothing else determines its proposals."""

    draft: LoadedDraft
    traces: TraceFolder
    batches: Sequence[Sequence[int]]
    num_draft_tokens: int
    temperature: float | None

    @functools.cached_property
    def content(self) -> dict[str, object]:
        """The question by content, whoever answers it, and in whatever batches."""
        return {
            "draft": draft_identity(self.draft),
            "traces": self.traces.sha256,
            "num_draft_tokens": self.num_draft_tokens,
            "temperature": self.temperature,
        }

    @functools.cached_property
    def key(self) -> dict[str, object]:
        """The question by content, batches, arithmetic and code."""
        return {
            "what": "proposals",
            **self.content,
            "batches": hashlib.sha256(json.dumps(self.batches).encode()).hexdigest(),
            **computing(self.draft.device),
        }

    def rows(self, position: int) -> int:
        """The number of positions of a prompt from which the draft proposes."""
        return len(rows_along(self.traces.manifest.prompts[position], self.num_draft_tokens))

    def answer(self, positions: Sequence[int]) -> list[Proposals]:
        """What the draft proposes along prompts that it runs together."""
        prompts = self.traces.manifest.prompts
        return self.proposed_by(self.draft, [self.traces.load(prompts[i]) for i in positions])

    def proposed_by(self, draft: LoadedDraft, batch: Sequence[PromptTrace]) -> list[Proposals]:
        """What this or another draft proposes along prompts that it runs together."""
        k, temperature = self.num_draft_tokens, self.temperature
        return proposals_of_batch(
            draft, self.traces, batch, num_draft_tokens=k, temperature=temperature
        )


@dataclass(slots=True, kw_only=True)
class ReplayCache:
    """What the first draft proposes, kept on disk, and in memory too where it `holds` it.

    What memory holds is not checked. `on_note` is told that a replay was recalled.
    """

    results: ResultCache | None
    on_note: Callable[[str], None]
    holds: bool = False
    _held: tuple[Mapping[str, object], Sequence[Proposals]] | None = None

    def recall(self, asked: ReplayQuestion) -> Sequence[Proposals] | None:
        """Proposals for every prompt in the order of the traces; None = it must be replayed."""
        if self._held is not None and self._held[0] == asked.key:
            return self._held[1]
        kept = None if self.results is None else self._kept(asked, self.results)
        if kept is not None and self.holds:
            self._held = asked.key, kept
        return kept

    def keep(self, asked: ReplayQuestion, proposals: Sequence[Proposals]) -> None:
        """Keep a replay's proposals for every prompt, in the order of the traces."""
        if self.holds:
            self._held = asked.key, proposals
        if self.results is not None:
            self.results.write(asked.key, encoded(proposals))

    def _kept(self, asked: ReplayQuestion, results: ResultCache) -> list[Proposals] | None:
        kept = results.read(asked.key)
        if kept is None:
            return None
        known = decoded(kept, asked, range(len(asked.traces)))
        if known is None:
            results.refuse(asked.key, "these are no proposals for the prompts of the traces")
            return None
        sample = _sample(asked)
        for position in sample:
            if not _holds(known, asked, position):
                prompt = asked.traces.manifest.prompts[position].id
                why = f"replayed again, the draft proposes other tokens for prompt {prompt!r}"
                results.refuse(asked.key, f"{why}; all prompts are replayed")
                return None
        self.on_note(
            f"{asked.draft.name}: its replay was kept in {results.folder}, and {len(sample)} of"
            f" {len(known)} prompts, replayed again, gave the same tokens (--no-cache replays all)"
        )
        return known


Elsewhere = Callable[[Sequence[ReplayQuestion]], Sequence[Sequence[Proposals]]]
"""Answers a question about each of some drafts, for every prompt in the order of the traces."""


def encoded(proposals: Sequence[Proposals]) -> bytes:
    """Tokens, then their log-probabilities if there are any; `decoded` reads it."""
    tokens = torch.cat([p.token_ids for p in proposals]).to(torch.int32)
    floats = [logprobs for p in proposals if (logprobs := p.recorded_logprobs) is not None]
    parts = [tokens, torch.cat(floats).float()] if floats else [tokens]
    return b"".join(part.numpy().tobytes() for part in parts)


def draft_identity(draft: LoadedDraft) -> str:
    """Hash of all that a draft computes with, as held; another place or name does not change it."""
    held = {
        "family": draft.family.name,
        "geometry": dataclasses.asdict(draft.geometry),
        "activations": dict(draft.activations),
        "cache": {layer: dataclasses.asdict(s) for layer, s in draft.cache_scales.items()},
        "dtype": str(draft.dtype),
    }
    names = [f"{name} {w.dtype} {list(w.shape)}" for name, w in draft.weights.items()]
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = dict(zip(names, pool.map(_digest, draft.weights.values()), strict=True))
    return tensors_sha256(digests | {"computed as": json.dumps(held, sort_keys=True, default=repr)})


def _digest(weight: Tensor) -> str:
    digest = Digest()
    for part in torch.split(weight.detach().reshape(-1), _BLOCK):
        digest.update(part.cpu().view(torch.uint8).numpy().data)
    return str(digest)


def _sample(asked: ReplayQuestion) -> list[int]:
    telling = [i for i in range(len(asked.traces)) if asked.rows(i)]
    count = min(len(telling), max(1, len(telling) // PROMPTS_PER_PROOF))
    return secrets.SystemRandom().sample(telling, count)


def _holds(proposals: Sequence[Proposals], asked: ReplayQuestion, position: int) -> bool:
    """Whether a replay repeats it: for the prompt alone, or, as batches round anew, for all."""
    if _equal(asked.answer([position])[0], proposals[position]):
        return True
    batch = next(batch for batch in asked.batches if position in batch)
    return all(_equal(a, proposals[i]) for i, a in zip(batch, asked.answer(batch), strict=True))


def _equal(first: Proposals, second: Proposals) -> bool:
    a, b = first.recorded_logprobs, second.recorded_logprobs
    alike = a is b is None or (a is not None and b is not None and torch.equal(a, b))
    return alike and torch.equal(first.token_ids, second.token_ids)


def decoded(kept: bytes, asked: ReplayQuestion, positions: Sequence[int]) -> list[Proposals] | None:
    """Proposals for prompts at these positions; None = wrong number, or not target tokens."""
    rows = [asked.rows(position) for position in positions]
    shape = (sum(rows), asked.num_draft_tokens)
    numbers = shape[0] * shape[1]
    with_logprobs = asked.temperature is not None
    if len(kept) != 4 * numbers * (2 if with_logprobs else 1):
        return None
    tokens = torch.from_numpy(np.frombuffer(kept, np.int32, numbers).astype(np.int64))
    vocabulary = asked.traces.manifest.target.vocab_size
    if numbers and not -1 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        return None
    proposals = [Proposals(token_ids=ids) for ids in torch.split(tokens.reshape(shape), rows)]
    if not with_logprobs:
        return proposals
    floats = np.frombuffer(kept, np.float32, numbers, 4 * numbers).copy()
    beside = torch.split(torch.from_numpy(floats).reshape(shape), rows)
    both = zip(proposals, beside, strict=True)
    return [dataclasses.replace(p, recorded_logprobs=logprobs) for p, logprobs in both]
