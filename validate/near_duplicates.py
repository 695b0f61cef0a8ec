"""Prompts that are not equal but hardly differ: many of them say less than they count."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SHARED_SHARE = 0.9
MIN_PROMPTS_OF_A_TASK = 10
"""Of fewer prompts, what they share may as well be that they are near duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of what the target made of it."""

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


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
    templates = _templates(distinct)
    alike = set()
    for one, other in pairwise(sorted(distinct)):
        template = min(templates[distinct[one].category], templates[distinct[other].category])
        shorter = min(len(one), len(other)) - template
        if shorter and _common_prefix(one, other) - template >= SHARED_SHARE * shorter:
            alike.add(other)
    continued: set[tuple[int, ...]] = set()
    for text in distinct.values():
        if text.continuation in continued:
            alike.add(text.prompt)
        continued.add(text.continuation)
    return len(alike)


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
