"""Prompts that are not equal but hardly differ: many of them say less than they count."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SHARED_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of what the target made of it."""

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def num_near_duplicates(texts: Iterable[PromptText]) -> int:
    """Distinct prompts that are like another one; copies (equal token ids) are not counted.

    A prompt is like another of its category if the two begin with the same tokens for at least 90 %
    of the shorter, the tokens with which all prompts of the category begin not counted: a chat
    template, a system prompt or a task's examples make no near duplicates. Sorted, each prompt
    stands beside the one with which it shares most, so that neighbours are all that is compared.
    Nor do two prompts count as two, of any category, that have the same continuation.

    Returns:
        Prompts beyond the first of each such group, at most the number of distinct prompts - 1.
    """
    distinct = {text.prompt: text for text in texts}
    by_category: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for text in distinct.values():
        by_category[text.category].append(text.prompt)
    alike = {again for prompts in by_category.values() for again in _long_prefixes(prompts)}
    continued: set[tuple[int, ...]] = set()
    for text in distinct.values():
        if text.continuation in continued:
            alike.add(text.prompt)
        continued.add(text.continuation)
    return len(alike)


def _long_prefixes(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The prompts that share a long prefix with the one sorted before them."""
    prompts = sorted(prompts)
    template = _common_prefix(prompts[0], prompts[-1])
    found = []
    for one, other in pairwise(prompts):
        shorter = min(len(one), len(other)) - template
        if shorter and _common_prefix(one, other) - template >= SHARED_SHARE * shorter:
            found.append(other)
    return found


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
