"""Golden acceptance of one draft: counts prompt by prompt, and the figures that follow from them.

The file has the figures for tools that only read; reading computes them again.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.decode import AT_LEAST_0, HEX_64, Bounds, encode
from ...recipes.errors import GoldenError, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object, reading
from ..counting.acceptance_counts import AcceptanceCounts, ContextBins, pooled
from ..counting.draft_counts import PromptCounts
from ..counting.paired_change import Floats, pseudo_values, sums_without
from ..judging.figures import context_bins_problem, differences
from ..measure.measurement import MOST_DRAFT_TOKENS, prompts_sha256

FORMAT: Literal["draftquant golden"] = "draftquant golden"
Source = Literal["replay", "vllm", "sglang", "tensorrt-llm"]
"""A replay of recorded traces, or the engine whose server was measured."""
ALL = ""
"""The category of all prompts together."""


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
class GoldenCategory:
    """Figures of some prompts; each cluster is one sample.

    Attributes:
        accepted_at: [K] verify steps that accepted the draft token at each position, 0 the first.
        mean_acceptance_length: 1 + accepted / verify steps, pooled.
        standard_error: of that, by the jackknife over clusters; None for fewer than two.
        variance_of_step: of the acceptance length over single verify steps.
        variance_of_request: the mean over requests of (accepted - steps x mean accepted)^2.
        design_effect: `variance_of_request` over `variance_of_step` times the mean number of steps
            of a request: 1 where steps of one request are independent; None without variance.
    """

    prompts: int
    clusters: int
    verify_steps: float
    accepted_at: tuple[float, ...]
    mean_acceptance_length: float
    standard_error: float | None
    variance_of_step: float
    variance_of_request: float
    design_effect: float | None

    @classmethod
    def of(cls, prompts: Sequence[GoldenPrompt]) -> "GoldenCategory":
        """Figures of at least one prompt, each with at least one verify step."""
        counts = pooled((prompt.counts for prompt in prompts), len(prompts[0].histogram) - 1)
        steps, rate = counts.num_steps, counts.mean_acceptance_length - 1
        squares = sum(n * accepted**2 for accepted, n in enumerate(counts.histogram))
        of_step = max(0.0, squares / steps - rate**2)
        by_prompt = [prompt.counts for prompt in prompts]
        beyond = (c.num_accepted_draft_tokens - rate * c.num_steps for c in by_prompt)
        of_request = math.fsum(number**2 for number in beyond) / len(by_prompt)
        independent = of_step * steps / len(by_prompt)
        return cls(
            prompts=len(prompts),
            clusters=len({prompt.cluster for prompt in prompts}),
            verify_steps=steps,
            accepted_at=counts.accepted_at,
            mean_acceptance_length=counts.mean_acceptance_length,
            standard_error=_standard_error(prompts),
            variance_of_step=of_step,
            variance_of_request=of_request,
            design_effect=of_request / independent if independent else None,
        )

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """[K] share of the verify steps that accepted the token at each position: unconditional."""
        return tuple(min(1.0, accepted / self.verify_steps) for accepted in self.accepted_at)

    @property
    def histogram(self) -> tuple[float, ...]:
        """[K + 1] verify steps by number of accepted draft tokens."""
        reached = (self.verify_steps, *self.accepted_at, 0)
        return tuple(before - after for before, after in itertools.pairwise(reached))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Golden(Brief):
    """Golden acceptance of one draft.

    Attributes:
        draftquant: version that wrote it.
        draft, draft_sha256: name and identity of its tensors; None = not known.
        source: "replay", or the engine whose server was measured.
        temperature: temperature of the target's text, 0 = greedy; None = not known.
        estimand: what is counted, in words: how text and proposals were chosen.
        prompts_sha256: identity of the prompts: of their ids, categories and token ids, in order.
        categories: figures by category, "" = of all prompts.
        context_edges: tokens before a verify step at which another context bin begins.
        context_bins: figures of all prompts by context bin, such as 1k-4k; those with steps.
    """

    format: Literal["draftquant golden"] = FORMAT
    schema_version: Literal[1] = 1
    draftquant: str
    draft: str
    draft_sha256: Annotated[str | None, HEX_64]
    target: str
    source: Source
    source_version: str
    num_draft_tokens: Annotated[int, Bounds(least=1, most=MOST_DRAFT_TOKENS)]
    temperature: Annotated[float | None, AT_LEAST_0]
    estimand: str
    prompts_sha256: Annotated[str, HEX_64]
    categories: Mapping[str, GoldenCategory]
    context_edges: tuple[int, ...] = ()
    context_bins: Mapping[str, GoldenCategory] = field(default_factory=dict)
    prompts: tuple[GoldenPrompt, ...]

    @property
    def all(self) -> GoldenCategory:
        """Figures of all prompts."""
        return self.categories[ALL]

    def problem(self) -> str:
        """What is impossible, or does not follow from the counts; empty if nothing."""
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
        computed = {
            "categories": categories_of(self.prompts),
            "context_bins": context_bins_of(self.prompts, self.context_edges),
        }
        for key, figures in computed.items():
            for where, expected, got in differences(key, figures, getattr(self, key)):
                return (
                    f"{where}: {short(got)} is not what the counts of the prompts give,"
                    f" {short(expected)}"
                )
        return ""

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "acceptance length": f"acceptance length {self.all.mean_acceptance_length:.4f}",
            "draft": self.draft,
            "K": self.num_draft_tokens,
            "prompts": self.all.prompts,
            "categories": len(self.categories) - 1 or None,
        }


def categories_of(prompts: Sequence[GoldenPrompt]) -> dict[str, GoldenCategory]:
    """Figures of all prompts, and of each category in the order in which they appear."""
    names = dict.fromkeys((ALL, *(prompt.category for prompt in prompts)))
    return {
        name: GoldenCategory.of([prompt for prompt in prompts if name in (ALL, prompt.category)])
        for name in names
    }


def context_bins_of(
    prompts: Sequence[GoldenPrompt], edges: Sequence[int]
) -> dict[str, GoldenCategory]:
    """Figures of all prompts in each context bin in which a verify step began."""
    figures: dict[str, GoldenCategory] = {}
    for i, label in enumerate(ContextBins(edges=tuple(edges)).labels):
        in_bin = [
            dataclasses.replace(prompt, histogram=prompt.context_bins[i])
            for prompt in prompts
            if i < len(prompt.context_bins) and any(prompt.context_bins[i])
        ]
        if in_bin:
            figures[label] = GoldenCategory.of(in_bin)
    return figures


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


def _standard_error(prompts: Sequence[GoldenPrompt]) -> float | None:
    sums: dict[int, Floats] = {}
    for prompt in prompts:
        totals = np.array(
            [prompt.counts.num_accepted_draft_tokens, prompt.counts.num_steps], dtype=float
        )
        sums[prompt.cluster] = sums.get(prompt.cluster, 0) + totals
    if len(sums) < 2:
        return None
    accepted, steps = np.stack(list(sums.values()), axis=1)
    with np.errstate(all="ignore"):  # a file may claim anything; NaN fits nothing
        without = sums_without(accepted) / sums_without(steps)
    values = pseudo_values(accepted.sum() / steps.sum(), without)
    return float(values.std(ddof=1)) / math.sqrt(len(values))


_OURS = "give what --golden of 'replay', 'gate', 'report' or 'measure' wrote, or write it again"


def golden_document(golden: Golden) -> str:
    """The text of a file; every prompt has a line of its own."""
    mapping = encode(golden)
    prompts = mapping.pop("prompts")
    head = json.dumps(mapping, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(prompt, allow_nan=False)}" for prompt in prompts)
    return f'{head},\n  "prompts": [\n{lines}\n  ]\n}}\n'


def read_golden(path: Path) -> Golden:
    """Read a file of golden acceptance; refuse it unless its figures follow from its counts."""
    with reading(path, GoldenError, _OURS, "is no golden acceptance: "):
        mapping = parse_object(read_text(path))
        if (kind := mapping.get("format")) != FORMAT:
            raise JsonProblem(f"expected format {FORMAT!r}, got {short(kind)}")
        return cast(Golden, decode(Golden, mapping))
