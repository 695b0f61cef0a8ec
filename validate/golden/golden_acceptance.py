"""Golden acceptance of one draft: counts prompt by prompt, of which its profile has figures."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from ...recipes.decode import AT_LEAST_0, HEX_64, Bounds, encode
from ...recipes.strict_json import decode
from ..counting.acceptance_counts import AcceptanceCounts
from ..judging.figures import context_bins_problem
from ..measure.measurement import MOST_DRAFT_TOKENS

FORMAT: Literal["draftquant golden"] = "draftquant golden"
Source = Literal["replay", "vllm", "sglang", "tensorrt-llm"]
"""A replay of recorded traces, or the engine whose server was measured."""


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


def golden_document(golden: Golden) -> str:
    """The text of a file; every prompt has a line of its own."""
    mapping = encode(golden)
    prompts = mapping.pop("prompts")
    head = json.dumps(mapping, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(prompt, allow_nan=False)}" for prompt in prompts)
    return f'{head},\n  "prompts": [\n{lines}\n  ]\n}}\n'


def golden_in(document: dict[str, object]) -> Golden:
    """The counts that a file holds, without the figures of earlier versions."""
    figures = ("categories", "context_bins")
    counts = {key: value for key, value in document.items() if key not in figures}
    return cast(Golden, decode(Golden, counts))
