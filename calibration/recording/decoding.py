"""How a target's text is continued: greedily, or drawn from its probabilities.

Temperature, then top-k, then top-p, as transformers, vLLM and SGLang apply them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...recipes.decode import AT_LEAST_0, SHARE_OR_ALL
from ...recipes.errors import TraceError
from ..traces.manifest import (
    DatasetSource,
    FeatureSpec,
    LogprobSpec,
    Sampling,
    TargetIdentity,
    TooLongPrompts,
    TraceManifest,
)
from ..traces.prompt_trace import prompt_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What a recorder is asked for.

    Attributes:
        temperature: 0 = greedy.
        top_p: in (0, 1], 1 = all tokens. top_k: 0 = all tokens.
        seed: of the draws; a prompt's draws depend on it and on the prompt's tokens alone.
        logprobs: keep the log-probabilities of emitted tokens; those of sampled ones are kept
            always.
    """

    temperature: float = 0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: bool = False
    num_top_logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        problem = self._problem()
        if problem:
            raise TraceError(*problem[:2], fix=problem[2])

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def manifest(
        self,
        target: TargetIdentity,
        features: FeatureSpec,
        *,
        recorded_by: str | None = None,
        too_long: TooLongPrompts | None = None,
        dataset: DatasetSource | None = None,
    ) -> TraceManifest:
        """What trace.json will say of texts that are continued so, before any is."""
        drawn = Sampling(top_p=self.top_p, top_k=self.top_k, seed=self.seed)
        return TraceManifest(
            temperature=self.temperature,
            sampling=drawn if self.sampled else None,
            ignore_eos=self.ignore_eos,
            recorded_by=recorded_by,
            target=target,
            features=features,
            logprobs=self.logprob_spec,
            too_long=too_long,
            datasets=(dataset,) if dataset else None,
        )

    @property
    def logprob_spec(self) -> LogprobSpec | None:
        """For trace.json: raw for greedy text, of the distribution drawn from for drawn text."""
        if not (self.sampled or self.logprobs or self.num_top_logprobs):
            return None
        return LogprobSpec(
            kind="processed" if self.sampled else "raw", num_top=self.num_top_logprobs
        )

    def _problem(self) -> tuple[str, str, str] | None:
        for name, value, allowed, fix in (
            ("--temperature", self.temperature, AT_LEAST_0, "0 is greedy"),
            ("--top-p", self.top_p, SHARE_OR_ALL, "1 keeps all tokens"),
            ("--top-k", self.top_k, AT_LEAST_0, "give a whole number"),
            ("--top-logprobs", self.num_top_logprobs, AT_LEAST_0, "give a whole number"),
        ):
            if problem := allowed.problem(value):
                return name, problem, fix
        if not self.sampled and (self.top_p, self.top_k) != (1, 0):
            what = "--top-p and --top-k have no effect, because decoding is greedy"
            return "--temperature", what, "give a --temperature above 0, or leave both out"
        return None


GREEDY = Decoding()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """The next token of B sequences.

    Attributes:
        token_ids: [B] int64.
        logprob: [B] float32; None where not asked for, as the next two.
        top_token_ids, top_logprobs: [B, num_top] int64 and float32, most likely first.
    """

    token_ids: Tensor
    logprob: Tensor | None
    top_token_ids: Tensor | None
    top_logprobs: Tensor | None


def prompt_draws(decoding: Decoding, token_ids: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) by which the tokens of a prompt are drawn, [count] float64 on the CPU.

    Each prompt has its own stream, so it is continued alike whatever it is batched with.
    """
    stream = torch.Generator().manual_seed(prompt_seed(decoding.seed, token_ids))
    return torch.rand(count, generator=stream, dtype=torch.float64)


def choose(decoding: Decoding, logits: Tensor, top1: Tensor, draws: Tensor | None) -> ChosenTokens:
    """The next token of B sequences by their last logits [B, V], whose largest are at `top1` [B].

    `draws`: [B] float64 on the same device, one of `prompt_draws` each; None where greedy.
    """
    spec = decoding.logprob_spec
    if spec is None:
        return ChosenTokens(token_ids=top1, logprob=None, top_token_ids=None, top_logprobs=None)
    logprobs = processed_logprobs(logits, decoding)
    token_ids = top1 if draws is None else _drawn(logprobs, draws)
    top = logprobs.topk(spec.num_top) if spec.num_top else None
    return ChosenTokens(
        token_ids=token_ids,
        logprob=logprobs.gather(1, token_ids[:, None])[:, 0],
        top_token_ids=top.indices if top else None,
        top_logprobs=top.values if top else None,
    )


def _drawn(logprobs: Tensor, draws: Tensor) -> Tensor:
    """One token per row by inversion, [B]; float64, as a vocabulary has many small terms."""
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    drawn = draws[:, None] * total
    drawn = drawn.minimum(total.nextafter(torch.zeros_like(total)))
    # The first token whose cumulative probability lies above the number: never one of zero.
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0]


def processed_logprobs(logits: Tensor, decoding: Decoding) -> Tensor:
    """[B, V] float32 log-probabilities of the distribution that tokens are drawn from.

    They are -infinity for tokens that top-k or top-p leave out; of tokens as likely as the last
    that top-k keeps, all are kept.
    """
    wide = logits.float()
    if not decoding.sampled:
        return wide.log_softmax(-1)
    wide = wide / decoding.temperature
    if 0 < decoding.top_k < wide.shape[-1]:
        least = wide.topk(decoding.top_k).values[:, -1:]
        wide = wide.masked_fill(wide < least, -torch.inf)
    if decoding.top_p < 1:
        ordered, order = wide.sort(dim=-1)  # ascending: what goes is the tail that sums to 1 - p
        tail = ordered.double().softmax(-1).cumsum(-1) <= 1 - decoding.top_p
        tail[:, -1] = False
        wide = wide.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    return wide.log_softmax(-1)


def prompt_seed(seed: int, token_ids: Sequence[int]) -> int:
    """The seed of a prompt's own draws, below 2**60."""
    return int(prompt_sha256((seed, *token_ids))[:15], 16)
