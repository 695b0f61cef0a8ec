"""Which prompts are related, so that together they say less, and one tells of the other.

Two prompts are related if 90 % of the shingles of the shorter are in the other, or of the shorter
of their continuations, not counting templates: what most texts have, or most of their category.
`held_out` asks this of sketches. Whole texts tell more: prompts are also related if they begin
alike, whatever their length, and if their continuations are equal.

Copies, turns of one conversation and prompts of a declared cluster are related as well. Pairs
decide: a continuation that several others hold only together is related to none of them.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

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
    cluster: str | None  # the same for turns of one conversation: no duplicates
    declared: str | None  # for prompts that their author declares as belonging together

    def shingled(self, *, continued: bool) -> Shingled:
        """The shingles of its prompt, or those of its continuation.

        A short continuation has none, because different prompts share it.
        """
        values = shingles(self.continuation) if continued else shingles(self.prompt, PROMPT_WIDTH)
        if continued and len(values) < _LEAST_CONTINUED:
            values = values[:0]
        document = self.declared or self.cluster or prompt_sha256(self.prompt)
        return Shingled(category=self.category, document=document, values=values)


def text_of(entry: TraceEntry | PromptTrace, token_ids: Sequence[int]) -> PromptText:
    """What is compared of a trace with these tokens."""
    prompt = tuple(token_ids[: entry.prompt_length])
    return PromptText(
        category=entry.category,
        prompt=prompt,
        continuation=tuple(token_ids[entry.prompt_length :]),
        cluster=entry.conversation_sha256 or prompt_sha256(prompt),
        declared=entry.cluster,
    )


def prompt_text(trace: PromptTrace) -> PromptText:
    """What is compared of a trace."""
    return text_of(trace, trace.token_ids.tolist())


Sketched = Mapping[tuple[str, str], int]
"""Category and sketch, as stored -> position of the first text that has them."""


def sketched(texts: Sequence[PromptText], *, continued: bool) -> Sketched:
    """The sketches of prompts, or of continuations, without what most of these texts have."""
    shingled = [text.shingled(continued=continued) for text in texts]
    positions: dict[tuple[str, str], int] = {}
    for position, sketch in enumerate(sketches_of(shingled, Templates(shingled))):
        if len(sketch.values):
            positions.setdefault((sketch.category, sketch.text), position)
    return positions


def related(
    known: Sketched, texts: Sequence[PromptText], *, continued: bool
) -> set[tuple[int, int]]:
    """Positions of known and of given texts whose prompts, or continuations, are related."""
    shingled, places = [text.shingled(continued=continued) for text in texts], list(known.values())
    sketches = [Sketch.parsed(*key) for key in known]
    pairs = overlapping(shingled, sketches, Templates(shingled, sketches))
    return {(places[number], position) for number, position in pairs}


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
    return sorted(sorted(group) for group in {id(g): g for g in groups.values()}.values())


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
    shingled = [text.shingled(continued=continued) for text in texts]
    templates = Templates(shingled)
    return overlapping(shingled, sketches_of(shingled, templates), templates)


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
        for category, prompts in by_category.items()
        for of in [prompts if len(prompts) >= MIN_PROMPTS_OF_A_TASK else every]
    }


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


_TURN = re.compile(r"/turn-\d+$")
_NUMBERED = re.compile(r"(?s)^(.+?)[-_/.:# ]\d+\Z")
"""doc1-2, boolq/17: a name, and a number within it."""
_DIGITS = re.compile(r"\d+")
_LEAST_GROUPS = 3


def suggested_clusters(prompts: Sequence[tuple[str, str]]) -> str:
    """What to know about prompts (id, category) without a declared cluster, or nothing.

    Ids suggest groups if, without their final number, there are at least three names for at least
    twice as many prompts, and not one per category; categories do if at least three
    differ only in a number. In groups of five that share an effect, 5 % of false passes become
    11 %.
    """
    named = {prompt_id: category for prompt_id, category in prompts if not _TURN.search(prompt_id)}
    stems = {prompt_id: _NUMBERED.sub(r"\1", prompt_id) for prompt_id in named}
    by_category = Counter((named[prompt_id], stem) for prompt_id, stem in stems.items())
    finer = len({category for category, _ in by_category}) < len(by_category)
    if finer and _are_groups(stems.values()):
        return _sentence("ids", sorted(set(stems.values())))
    categories = [_DIGITS.sub("#", category) for category in set(named.values())]
    numbered = {form for form, count in Counter(categories).items() if count >= _LEAST_GROUPS}
    within = [c for c in named.values() if _DIGITS.sub("#", c) in numbered and _DIGITS.search(c)]
    if _are_groups(within):
        return _sentence("categories", sorted(set(within)))
    return ""


def _are_groups(declared: Iterable[str]) -> bool:
    names = list(declared)
    return _LEAST_GROUPS <= len(set(names)) <= len(names) / 2


def _sentence(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"The {what} look like {len(names)} groups ({shown}). If prompts of a group share a"
        ' document, a task or a user, declare it as "cluster" in the prompt file: undeclared, the'
        " bounds are too narrow."
    )
