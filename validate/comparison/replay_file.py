"""What `draftquant replay --json` prints of each draft, with its counts per prompt: its keys."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.drafts.draft_cache import CacheScaleOrigin
from ...recipes.decode import encode
from ...recipes.errors import CompareError
from ...recipes.formats import AS_STORED, FP8_CACHE, KvCacheDtype, OnlineHead, ServedForm
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_json
from ..counting.acceptance_counts import AcceptanceCounts, ContextCounts, DraftSampling, estimand
from ..counting.draft_counts import (
    DraftReplay,
    PromptCounts,
    PromptReplay,
    TraceFigures,
    context_edges,
)
from ..judging.figures import (
    MOST_DRAFT_TOKENS,
    DraftFigures,
    context_bins_problem,
    draft_figures,
    is_histogram,
)

_LEFT = ("confidence_head", "shortened")
"""Keys of 0.2 that change no count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPrompt:
    """One prompt; `num_steps` is the sum of `histogram`, which has K + 1 columns.

    Attributes:
        shorter: [K - 1] the histograms where fewer proposals are verified, of 2, 3, .. K columns;
            none in what 0.2 printed.
        context_bins: [bins, K + 1] the histogram by context bin, without the empty bins at the end;
            none in what 0.2 printed.
    """

    id: str
    category: str
    prompt_sha256: str
    num_steps: float
    histogram: tuple[float, ...]
    cluster: str = ""
    shorter: tuple[tuple[float, ...], ...] = ()
    context_bins: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, prompt: PromptReplay) -> "ReplayedPrompt":
        """Of a replay."""
        return cls(
            id=prompt.id,
            category=prompt.category,
            prompt_sha256=prompt.prompt_sha256,
            num_steps=prompt.counts.num_steps,
            histogram=prompt.counts.histogram,
            cluster=prompt.cluster,
            shorter=tuple(one.histogram for one in prompt.shorter),
            context_bins=prompt.contexts.histograms if prompt.contexts else (),
        )

    def counted(self, context_edges: Sequence[int]) -> PromptCounts:
        """What was counted of it."""
        return PromptCounts(
            id=self.id,
            category=self.category,
            prompt_sha256=self.prompt_sha256,
            counts=AcceptanceCounts(histogram=self.histogram),
            cluster=self.cluster,
            contexts=ContextCounts.of_histograms(
                self.context_bins, len(self.histogram) - 1, context_edges
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft(DraftFigures):
    """One draft: an item of the list that `replay --json` prints; 0.2 printed no defaults.

    Attributes:
        first_step_agreement: share of the positions where it proposes what the first draft does.
        rope_theta, dtype: that it was replayed with; None = as its config.json has it.
        head_online: what vLLM made of its head while it loaded; None = the head is the folder's.
        kv_cache: None = BF16. cache_scales: whether its scales are the folder's, or 1.
    """

    estimand: str
    num_draft_tokens: int
    draft_sampling: DraftSampling
    traces: TraceFigures
    first_step_agreement: float
    prompts: tuple[ReplayedPrompt, ...]
    rope_theta: float | None
    dtype: str
    family: str = ""
    draft_vocab_size: int | None = None
    quantized: bool | None = None
    head_online: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None
    cache_scales: CacheScaleOrigin | None = None
    context_edges: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        replay: DraftReplay,
        *,
        rope_theta: float | None,
        dtype: str,
        served: ServedForm = AS_STORED,
    ) -> "ReplayedDraft":
        """Of a replay that was made with these settings."""
        traces = replay.traces
        return cls(
            **dataclasses.asdict(draft_figures(replay)),
            estimand=estimand(traces.temperature, traces.sampling, replay.draft_sampling),
            num_draft_tokens=replay.num_draft_tokens,
            draft_sampling=replay.draft_sampling,
            traces=traces,
            first_step_agreement=replay.first_step.share,
            prompts=tuple(map(ReplayedPrompt.of, replay.prompts)),
            rope_theta=rope_theta,
            dtype=dtype,
            family=replay.family,
            draft_vocab_size=replay.draft_vocab_size,
            quantized=replay.quantized,
            head_online=served.online_head,
            kv_cache=None if replay.cache_scales is None else FP8_CACHE,
            cache_scales=replay.cache_scales,
            context_edges=context_edges(replay.prompts),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON; a prompt says its cluster where it has one."""
        plain = dataclasses.asdict(self) | {"prompts": [encode(one) for one in self.prompts]}
        plain["traces"]["features"] = encode(self.traces.features)
        return plain

    @property
    def counted(self) -> list[PromptCounts]:
        """What was counted of each prompt."""
        return [prompt.counted(self.context_edges) for prompt in self.prompts]

    def problem(self) -> str:
        """What no replay says; empty for what one may say."""
        depth = self.num_draft_tokens
        if not 1 <= depth <= MOST_DRAFT_TOKENS:
            return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {depth}"
        for prompt in self.prompts:
            if prompt.num_steps and not is_histogram(prompt.histogram, depth):
                return f"prompts: {prompt.id!r}: expected {depth + 1} counts of verify steps"
            problem = context_bins_problem(
                prompt.histogram, prompt.context_bins, self.context_edges, add_up=True
            )
            if problem:
                return f"prompts: {prompt.id!r}: context_bins: {problem}"
            if prompt.shorter and not _are_shorter(prompt, depth):
                return (
                    f"prompts: {prompt.id!r}: shorter: expected histograms for K = 1 .. {depth - 1}"
                )
        return ""


def _are_shorter(prompt: ReplayedPrompt, depth: int) -> bool:
    columns = [len(one) for one in prompt.shorter]
    if columns != list(range(2, depth + 1)):
        return False
    steps = [histogram for histogram in prompt.shorter if sum(histogram)]
    return all(is_histogram(one, len(one) - 1) for one in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replays:
    replays: tuple[ReplayedDraft, ...]


def read_replays(path: Path) -> tuple[ReplayedDraft, ...]:
    """What `replay --json` printed, else CompareError."""
    try:
        plain = parse_json(read_text(path))
        found: _Replays = decode(_Replays, {"replays": _without_left(plain)})
    except (OSError, JsonProblem) as exc:
        raise CompareError(
            path,
            f"is no list of replays: {exc}",
            fix="give what 'draftquant replay --json' printed",
        ) from exc
    return found.replays


def _without_left(replays: object) -> object:
    if not isinstance(replays, list):
        return replays
    return [
        {key: value for key, value in one.items() if key not in _LEFT}
        if isinstance(one, dict)
        else one
        for one in replays
    ]
