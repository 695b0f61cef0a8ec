"""Golden acceptance of one draft: counts prompt by prompt, of which its profile has figures."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from ...recipes.decode import AT_LEAST_0, HEX_64, Bounds, encode
from ...recipes.strict_json import decode
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.draft_counts import PromptCounts
from ..judging.figures import context_bins_problem
from ..measure.measurement import MOST_DRAFT_TOKENS, prompts_sha256

FORMAT: Literal["draftquant golden"] = "draftquant golden"
Source = Literal["replay", "vllm", "sglang", "tensorrt-llm"]
"""A replay of recorded traces, or the engine whose server was measured."""
_FIGURES = ("categories", "context_bins")
"""What earlier versions wrote beside the counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """One request: [K + 1] verify steps by number of accepted draft tokens.

    Prompts of one cluster hardly differ. `context_bins`: [bins, K + 1] without the empty bins at
    the end; empty where the number of tokens before each step is not known.
    """

    category: str
    cluster: int
    histogram: tuple[float, ...]
    context_bins: tuple[tuple[float, ...], ...] = ()

    @property
    def counts(self) -> AcceptanceCounts:
        """Its verify steps."""
        return AcceptanceCounts(histogram=self.histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Golden acceptance of one draft.

    Attributes:
        draftquant: version that wrote it.
        draft, draft_sha256: name and identity of its tensors; None = not known.
        method: how it drafts, in vLLM's words or those of its server; None = not known.
        source: "replay", or the engine whose server was measured.
        temperature: temperature of the target's text, 0 = greedy; None = not known.
        estimand: what is counted, in words: how text and proposals were chosen.
        prompts_sha256: identity of the prompts: of their ids, categories and token ids, in order.
        context_edges: tokens before a verify step at which another context bin begins.
    """

    format: Literal["draftquant golden"] = FORMAT
    schema_version: Literal[1] = 1
    draftquant: str
    draft: str
    draft_sha256: Annotated[str | None, HEX_64]
    method: str | None = None
    target: str
    source: Source
    source_version: str
    num_draft_tokens: Annotated[int, Bounds(least=1, most=MOST_DRAFT_TOKENS)]
    temperature: Annotated[float | None, AT_LEAST_0]
    estimand: str
    prompts_sha256: Annotated[str, HEX_64]
    context_edges: tuple[int, ...] = ()
    prompts: tuple[GoldenPrompt, ...]

    def problem(self) -> str:
        """What is impossible; empty if nothing."""
        if not self.prompts:
            return "prompts: empty list"
        columns = self.num_draft_tokens + 1
        for i, prompt in enumerate(self.prompts):
            counts = prompt.histogram
            if len(counts) != columns or min(counts) < 0 or not 1 <= sum(counts) < 1e12:
                return f"prompts[{i}].histogram: expected {columns} counts of verify steps"
            if problem := context_bins_problem(
                counts, prompt.context_bins, self.context_edges, add_up=True
            ):
                return f"prompts[{i}].context_bins: {problem}"
        return ""


def golden_prompts(prompts: Iterable[PromptCounts]) -> tuple[tuple[GoldenPrompt, ...], str]:
    """Prompts with at least one verify step, their clusters numbered; and the identity of all."""
    counted = [prompt for prompt in prompts if prompt.counts.num_steps]
    numbers: dict[str, int] = {}
    numbered = tuple(
        GoldenPrompt(
            category=prompt.category,
            cluster=numbers.setdefault(prompt.counted_with, len(numbers)),
            histogram=prompt.counts.histogram,
            context_bins=() if prompt.contexts is None else prompt.contexts.histograms,
        )
        for prompt in counted
    )
    return numbered, prompts_sha256((p.id, p.category, p.prompt_sha256) for p in counted)


def golden_document(golden: Golden) -> str:
    """The text of a file; every prompt has a line of its own."""
    mapping = encode(golden)
    prompts = mapping.pop("prompts")
    head = json.dumps(mapping, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(prompt, allow_nan=False)}" for prompt in prompts)
    return f'{head},\n  "prompts": [\n{lines}\n  ]\n}}\n'


def golden_in(document: dict[str, object]) -> Golden:
    """The counts that a file holds; JsonProblem if they are impossible."""
    counts = {key: value for key, value in document.items() if key not in _FIGURES}
    return cast(Golden, decode(Golden, counts))
