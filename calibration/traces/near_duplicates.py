"""Prompts that are not equal but hardly differ: many of them say less than they count."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .prompt_trace import PromptTrace

SHARED_SHARE = 0.9
MIN_PROMPTS_OF_A_TASK = 10
"""Of fewer prompts, what they share may as well be that they are near duplicates."""
Alike = tuple[tuple[int, ...], tuple[int, ...]]
"""Two prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of what the target made of it.

    `cluster` is the same for turns of one conversation, which are no duplicates of each other.
    """

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cluster: str | None = None


def prompt_text(trace: PromptTrace) -> PromptText:
    """What is compared of a trace."""
    return PromptText(
        category=trace.category,
        prompt=tuple(trace.token_ids[: trace.prompt_length].tolist()),
        continuation=trace.continuation,
        cluster=trace.cluster_sha256,
    )


def num_near_duplicates(texts: Iterable[PromptText]) -> int:
    """Distinct prompts that are like another one; copies (equal token ids) are not counted.

    A prompt is like another if the two begin with the same tokens for at least 90 % of the shorter,
    those of a template not counted: the tokens with which all prompts begin, or all of a category
    with ten or more, so that a system prompt or a task's examples make no near duplicates. Sorted,
    each prompt stands beside the one with which it shares most, and only neighbours are compared.
    Two prompts with the same continuation are alike too.

    Returns:
        Prompts beyond the first of each such group, at most the number of distinct prompts - 1.
    """
    distinct = {text.prompt: text for text in texts}
    return len({other for _, other in _alike(distinct)})


def independent_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """Positions of texts that belong together: copies, turns of a conversation, near duplicates.

    Returns:
        Each position once; groups in the order of their first members.
    """
    distinct = {text.prompt: text for text in texts}
    groups = {prompt: [prompt] for prompt in distinct}  # shared by all members of a group
    first_of: dict[str, tuple[int, ...]] = {}
    turns = (
        (first_of.setdefault(text.cluster, prompt), prompt)
        for prompt, text in distinct.items()
        if text.cluster is not None
    )
    for one, other in (*_alike(distinct), *turns):
        if groups[one] is not groups[other]:
            joined = groups[one] + groups[other]
            groups |= dict.fromkeys(joined, joined)
    positions: dict[int, list[int]] = {}
    for position, text in enumerate(texts):
        positions.setdefault(id(groups[text.prompt]), []).append(position)
    return list(positions.values())


def _alike(distinct: Mapping[tuple[int, ...], PromptText]) -> Iterator[Alike]:
    """Pairs of prompts that are near duplicates; the second is the one beyond the first."""
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
