"""Which prompts are related, so that together they say less, and one tells of the other.

Two prompts are related if 90 % of the shingles of the shorter are in the other, or of the shorter
of their continuations, not counting templates: what most texts have, or most of their category.
`held_out` asks this of sketches. Whole texts tell more: prompts are also related if they begin
alike, whatever their length, and if their continuations are equal.

Copies, turns of one conversation and prompts of a declared cluster are related as well. Pairs
decide: a continuation that several others hold only together is related to none of them.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from ...quantize.files.provenance import Sketches
from .manifest import TraceEntry
from .prompt_trace import PromptTrace, prompt_sha256
from .shingles import (
    PROMPT_WIDTH,
    SHARED_SHARE,
    Shingled,
    Sketch,
    Templates,
    overlapping,
    shingles,
    sketches_of,
)

MIN_PROMPTS_OF_A_TASK = 10
"""With fewer prompts, what they share may as well mean that they are near duplicates."""
_LEAST_CONTINUED = 16
"""Different shingles of a continuation: 31 tokens or more, and no loop of a few."""
_CLAIMS = ("prompt", "cluster", "declared")
"""What is equal for related prompts, besides what their texts share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of the target's continuation."""

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cluster: str | None = None  # the same for turns of one conversation: no duplicates
    declared: str | None = None  # for prompts that their author declares as belonging together

    def shingled(self, *, continued: bool) -> Shingled:
        """The shingles of its prompt, or those of its continuation.

        A short continuation has none, because different prompts share it.
        """
        values = shingles(self.continuation) if continued else shingles(self.prompt, PROMPT_WIDTH)
        if continued and len(values) < _LEAST_CONTINUED:
            values = values[:0]
        document = self.declared or self.cluster or prompt_sha256(self.prompt)
        return Shingled(category=self.category, document=document, values=values)


def text_of(one: TraceEntry | PromptTrace, token_ids: Sequence[int]) -> PromptText:
    """What is compared of a trace with these tokens."""
    prompt = tuple(token_ids[: one.prompt_length])
    return PromptText(
        category=one.category,
        prompt=prompt,
        continuation=tuple(token_ids[one.prompt_length :]),
        cluster=one.conversation_sha256 or prompt_sha256(prompt),
        declared=one.cluster,
    )


def prompt_text(trace: PromptTrace) -> PromptText:
    """What is compared of a trace."""
    return text_of(trace, trace.token_ids.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSketches:
    """What is kept of some texts: (category, sketch as stored) -> position of its first text."""

    prompts: Mapping[tuple[str, str], int]
    continuations: Mapping[tuple[str, str], int]

    @classmethod
    def of(cls, texts: Sequence[PromptText]) -> "TextSketches":
        """Those of whole texts, without what most of these texts have."""
        return cls(
            prompts=_kept(texts, continued=False), continuations=_kept(texts, continued=True)
        )

    @classmethod
    def stored(cls, sketches: Sketches) -> "TextSketches":
        """Those of texts that are not at hand."""
        prompts, continuations = (
            {(category, text): 0 for category, own in of.items() for text in own}
            for of in (sketches.minima, sketches.continuations)
        )
        return cls(prompts=prompts, continuations=continuations)

    def related(self, texts: Sequence[PromptText], *, continued: bool) -> set[tuple[int, int]]:
        """Positions of kept and of given texts whose prompts, or continuations, are related."""
        kept = self.continuations if continued else self.prompts
        own = [text.shingled(continued=continued) for text in texts]
        sketches = [Sketch.parsed(*one) for one in kept]
        places = list(kept.values())
        found = overlapping(own, sketches, Templates(own, sketches))
        return {(places[number], position) for number, position in found}


def _kept(texts: Sequence[PromptText], *, continued: bool) -> dict[tuple[str, str], int]:
    own = [text.shingled(continued=continued) for text in texts]
    found: dict[tuple[str, str], int] = {}
    for position, sketch in enumerate(sketches_of(own, Templates(own))):
        if len(sketch.values):
            found.setdefault((sketch.category, sketch.text), position)
    return found


def num_near_duplicates(texts: Sequence[PromptText]) -> int:
    """Prompts that are related by their text to an earlier one; copies and turns do not count."""
    copies = list(_equal([text.prompt for text in texts]))
    alone = united(range(len(texts)), copies)
    return len(alone) - len(united(range(len(texts)), (*copies, *_alike(texts))))


def related_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """Positions of related texts, transitively, in the order of their first members."""
    claimed = chain(*(_equal([getattr(text, key) for text in texts]) for key in _CLAIMS))
    return united(range(len(texts)), chain(_alike(texts), claimed))


def alike_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """As `related_groups`, by texts alone: conversations and clusters are only claims."""
    return related_groups([replace(text, cluster=None, declared=None) for text in texts])


def united(positions: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Groups of positions that pairs connect, in the order of their first members."""
    groups = {position: [position] for position in positions}  # shared by all members of a group
    for one, other in pairs:
        if groups[one] is not groups[other]:
            larger, smaller = sorted((groups[one], groups[other]), key=len, reverse=True)
            larger += smaller
            groups |= dict.fromkeys(smaller, larger)
    return sorted(sorted(group) for group in {id(own): own for own in groups.values()}.values())


def _equal(keys: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """Positions of equal keys: each with the first one; None equals none."""
    first: dict[Hashable, int] = {}
    for position, key in enumerate(keys):
        if key is not None:
            yield first.setdefault(key, position), position


def _alike(texts: Sequence[PromptText]) -> Iterator[tuple[int, int]]:
    """Positions of texts that are related by what they say, but for turns of one conversation."""
    for one, other in chain(
        _overlapping(texts, continued=False),
        _overlapping(texts, continued=True),
        _begin_alike(texts),
        _equal(text.continuation for text in texts),
    ):
        cluster = texts[one].cluster
        if cluster is None or cluster != texts[other].cluster:
            yield one, other


def _overlapping(texts: Sequence[PromptText], *, continued: bool) -> Iterator[tuple[int, int]]:
    own = [text.shingled(continued=continued) for text in texts]
    templates = Templates(own)
    return overlapping(own, sketches_of(own, templates), templates)


def _begin_alike(texts: Sequence[PromptText]) -> Iterator[tuple[int, int]]:
    """Pairs that begin with the same tokens for 90 % of the shorter, besides a common beginning.

    Shingles do not show this of prompts below 43 tokens that differ at the end. Sorted, each
    prompt is beside the one with which it shares most, and only neighbours are compared.
    """
    distinct = {text.prompt: position for position, text in enumerate(texts)}
    common = _common_beginnings(texts)
    for one, other in pairwise(sorted(distinct)):
        places = distinct[one], distinct[other]
        template = min(common[texts[place].category] for place in places)
        shorter = min(len(one), len(other)) - template
        if shorter and _common_prefix(one, other) - template >= SHARED_SHARE * shorter:
            yield places


def _common_beginnings(texts: Sequence[PromptText]) -> dict[str, int]:
    """How many tokens all prompts of each category, or all there are, have in front."""
    by_category: dict[str, set[tuple[int, ...]]] = {}
    for text in texts:
        by_category.setdefault(text.category, set()).add(text.prompt)
    every = set().union(*by_category.values())
    return {
        category: _common_prefix(min(of), max(of))
        for category, own in by_category.items()
        for of in [own if len(own) >= MIN_PROMPTS_OF_A_TASK else every]
    }


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
