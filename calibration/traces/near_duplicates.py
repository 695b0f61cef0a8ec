"""Prompts that are not equal but hardly differ: many of them say less than they count."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .prompt_trace import PromptTrace
from .shingles import PROMPT_WIDTH, SKETCH, Overlaps, Shingled, Templates, largest_known, shingles

SHARED_SHARE = 0.9
MIN_PROMPTS_OF_A_TASK = 10
"""Of fewer prompts, what they share may as well be that they are near duplicates."""
Alike = tuple[tuple[int, ...], tuple[int, ...]]
"""Two prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of what the target made of it.

    `cluster` is the same for turns of one conversation, which are no duplicates of each other;
    `declared` for prompts that their author says belong together.
    """

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cluster: str | None = None
    declared: str | None = None


def prompt_text(trace: PromptTrace) -> PromptText:
    """What is compared of a trace."""
    return PromptText(
        category=trace.category,
        prompt=tuple(trace.token_ids[: trace.prompt_length].tolist()),
        continuation=trace.continuation,
        cluster=trace.cluster_sha256,
        declared=trace.cluster,
    )


def num_near_duplicates(texts: Iterable[PromptText]) -> int:
    """Distinct prompts that are like another one; copies (equal token ids) are not counted.

    A prompt is like another if the two begin with the same tokens for at least 90 % of the shorter,
    those of a template not counted: the tokens with which all prompts begin, or all of a category
    with ten or more, so that a system prompt or a task's examples make no near duplicates. Sorted,
    each prompt stands beside the one with which it shares most, and only neighbours are compared.
    It is so too if 90 % of the shingles of the shorter, those of templates not counted, are in the
    other: whatever their first token is. Two prompts with the same continuation are alike too.

    Returns:
        Prompts beyond the first of each group of such, less than the number of distinct prompts.
    """
    distinct = {text.prompt: text for text in texts}
    return len(distinct) - len(_united(distinct, _alike(distinct)))


def independent_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """Positions of texts that belong together.

    Copies do, turns of a conversation, near duplicates, and prompts of one declared cluster.

    Returns:
        Each position once; groups in the order of their first members.
    """
    distinct = {text.prompt: text for text in texts}
    first_of: dict[tuple[str, str], tuple[int, ...]] = {}
    related = [
        (first_of.setdefault((kind, name), text.prompt), text.prompt)
        for text in texts
        for kind, name in (("conversation", text.cluster), ("declared", text.declared))
        if name is not None
    ]
    place = {
        prompt: number
        for number, group in enumerate(_united(distinct, (*_alike(distinct), *related)))
        for prompt in group
    }
    positions: dict[int, list[int]] = {}
    for position, text in enumerate(texts):
        positions.setdefault(place[text.prompt], []).append(position)
    return list(positions.values())


def alike_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """As `independent_groups`, by the texts alone: conversations and clusters are only claimed."""
    return independent_groups([replace(text, cluster=None, declared=None) for text in texts])


def _united(
    prompts: Iterable[tuple[int, ...]], pairs: Iterable[Alike]
) -> list[list[tuple[int, ...]]]:
    """Groups of prompts that pairs tie together."""
    groups = {prompt: [prompt] for prompt in prompts}  # shared by all members of a group
    for one, other in pairs:
        if groups[one] is not groups[other]:
            joined = groups[one] + groups[other]
            groups |= dict.fromkeys(joined, joined)
    return list({id(group): group for group in groups.values()}.values())


def _alike(distinct: Mapping[tuple[int, ...], PromptText]) -> Iterator[Alike]:
    """Pairs of prompts that are near duplicates."""
    yield from _alike_in_shingles(distinct)
    templates = _templates(distinct)
    for one, other in pairwise(sorted(distinct)):
        template = min(templates[distinct[one].category], templates[distinct[other].category])
        shorter = min(len(one), len(other)) - template
        if _turns_of_one(distinct[one], distinct[other]):
            continue
        if shorter and _common_prefix(one, other) - template >= SHARED_SHARE * shorter:
            yield one, other
    continued: dict[tuple[int, ...], PromptText] = {}
    for text in distinct.values():
        first = continued.setdefault(text.continuation, text)
        if first is not text and not _turns_of_one(first, text):
            yield first.prompt, text.prompt


def _alike_in_shingles(distinct: Mapping[tuple[int, ...], PromptText]) -> Iterator[Alike]:
    """Pairs of which the shorter is in the other, by the sketch of one and all shingles of both."""
    texts = list(distinct.values())
    prompts = [
        Shingled(
            category=text.category,
            document=text.declared or text.cluster or str(number),
            values=shingles(text.prompt, PROMPT_WIDTH),
        )
        for number, text in enumerate(texts)
    ]
    templates = Templates(prompts)
    own = [templates.own(prompt.values, prompt.category) for prompt in prompts]
    overlaps = Overlaps(own)
    for text, values in zip(texts, own, strict=True):
        sketch = values[:SKETCH]
        found = overlaps.with_sketch(sketch, largest=largest_known(sketch))
        for number in (found >= SHARED_SHARE).nonzero()[0]:
            other = texts[number]
            if other is not text and not _turns_of_one(text, other):
                yield text.prompt, other.prompt


def _turns_of_one(one: PromptText, other: PromptText) -> bool:
    return one.cluster is not None and one.cluster == other.cluster


def _templates(distinct: Mapping[tuple[int, ...], PromptText]) -> dict[str, int]:
    """How many tokens the prompts of each category have in front of what is their own."""
    by_category: dict[str, list[tuple[int, ...]]] = {}
    for text in distinct.values():
        by_category.setdefault(text.category, []).append(text.prompt)
    of_all = _common_prefix(min(distinct), max(distinct)) if distinct else 0
    return {
        category: _common_prefix(min(own), max(own))
        if len(own) >= MIN_PROMPTS_OF_A_TASK
        else of_all
        for category, own in by_category.items()
    }


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
