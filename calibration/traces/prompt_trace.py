"""One prompt of a trace in memory, and what must hold for it whoever recorded it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.files.mapped_rows import row_blocks
from ...recipes.errors import TraceError
from .manifest import FeatureDtype, TraceManifest

FEATURE_DTYPES: dict[FeatureDtype, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "float64": (torch.float64, "F64"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}
"""Manifest spelling -> (torch dtype, safetensors spelling)."""

_AGAIN = "record the traces again"
_MAX_LOGPROB = 1e-3  # engines round logarithms of probabilities near 1 to slightly above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrace:
    """One prompt and its continuation; log-probabilities are None where they are not recorded.

    `conversation_sha256`: `prompt_sha256` of the conversation's first turn; None for that turn.
    """

    id: str
    category: str
    prompt_length: int
    token_ids: Tensor  # [N] int64
    features: Tensor  # [N - 1, width], dtype of the manifest, finite
    target_top1: Tensor  # [N - 1] int64, argmax after each position, -1 = not known
    token_logprob: Tensor | None = None  # [N - P] float32, of the continuation
    top_token_ids: Tensor | None = None  # [N - P, num_top] int64
    top_logprobs: Tensor | None = None  # [N - P, num_top] float32
    conversation_sha256: str | None = None
    cluster: str | None = None  # document, task or user that it shares with others
    feature_scales: Tensor | None = None  # [N - 1] float32, of features rounded to FP8

    @property
    def num_tokens(self) -> int:
        """N, prompt and continuation."""
        return self.token_ids.shape[0]

    @property
    def prompt_sha256(self) -> str:
        """Identity of the prompt: see `prompt_sha256`."""
        return prompt_sha256(self.token_ids[: self.prompt_length].tolist())

    @property
    def cluster_sha256(self) -> str:
        """Identity of the conversation: turns of one, and copies of them, are not independent."""
        return self.conversation_sha256 or self.prompt_sha256

    @property
    def continuation(self) -> tuple[int, ...]:
        """The token ids that the target chose."""
        return tuple(self.token_ids[self.prompt_length :].tolist())


def prompt_sha256(token_ids: Sequence[int]) -> str:
    """Identity of a prompt, whatever its id: hash of its token ids, decimal, comma-separated."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def check_trace(trace: PromptTrace, manifest: TraceManifest, where: object) -> None:
    """Check one trace in memory: shapes, dtypes, ranges, and that decoding was as declared."""
    problem = _trace_problem(trace, manifest) or _logprob_problem(trace, manifest)
    if problem:
        raise TraceError(where, f"prompt {trace.id}: {problem[0]}", fix=problem[1])


def _trace_problem(trace: PromptTrace, manifest: TraceManifest) -> tuple[str, str] | None:
    features, vocab_size = manifest.features, manifest.target.vocab_size
    count, start = trace.num_tokens, trace.prompt_length
    if not 1 <= start < count:
        return (
            f"it has {count} tokens, of which {start} are the prompt, so there is no continuation"
        ), _AGAIN
    expected = (count - 1, features.width)
    if tuple(trace.features.shape) != expected or trace.target_top1.shape != (count - 1,):
        return (
            f"expected features {list(expected)} and target_top1 [{count - 1}], got"
            f" {list(trace.features.shape)} and {list(trace.target_top1.shape)}",
            _AGAIN,
        )
    if trace.features.dtype != FEATURE_DTYPES[features.dtype][0]:
        return f"expected {features.dtype} features, got {trace.features.dtype}", _AGAIN
    for name, ids, least in (
        ("token_ids", trace.token_ids, 0),
        ("target_top1", trace.target_top1, -1),
    ):
        if int(ids.min()) < least or int(ids.max()) >= vocab_size:
            return f"{name}: expected ids in [{least}, {vocab_size})", _AGAIN
    if not all(bool(torch.isfinite(block).all()) for block in row_blocks(trace.features)):
        return "the features contain NaN or infinity", "record in a wider dtype"
    greedy = trace.target_top1[start - 1 :] == trace.token_ids[start:]
    if not manifest.sampled and not bool(greedy.all()):
        first = start + int(greedy.int().argmin())
        return (
            f"the trace is not greedy: token {first} is {int(trace.token_ids[first])}, the target's"
            f" argmax was {int(trace.target_top1[first - 1])}",
            "record at temperature 0, without penalties or grammar",
        )
    return None


def _logprob_problem(trace: PromptTrace, manifest: TraceManifest) -> tuple[str, str] | None:
    given = (trace.token_logprob, trace.top_token_ids, trace.top_logprobs)
    spec, count = manifest.logprobs, trace.num_tokens - trace.prompt_length
    num_top = spec.num_top if spec else 0
    shapes = [(count,) if spec else None, *[(count, num_top) if num_top else None] * 2]
    got = [None if tensor is None else tuple(tensor.shape) for tensor in given]
    if got != shapes:
        return (
            f"token_logprob, top_token_ids, top_logprobs: expected shapes {shapes}, got {got}",
            _AGAIN,
        )
    for name, values in (("token_logprob", given[0]), ("top_logprobs", given[2])):
        # NaN is not a number, and compares false.
        if values is not None and not bool((values <= _MAX_LOGPROB).all()):
            return f"{name}: expected logarithms of probabilities, at most 0", _AGAIN
    if trace.token_logprob is not None and not bool(torch.isfinite(trace.token_logprob).all()):
        return "token_logprob: a token that was emitted has probability 0", _AGAIN
    top = trace.top_token_ids
    if top is not None and not 0 <= int(top.min()) <= int(top.max()) < manifest.target.vocab_size:
        return f"top_token_ids: expected ids in [0, {manifest.target.vocab_size})", _AGAIN
    return None
