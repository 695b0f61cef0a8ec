"""What a target says on recorded prompts, token by token: what the head of a draft must propose.

A verify step follows a token that is committed already, so the first token of a continuation, which
comes from the prefill, is never proposed; every later one is. Those are counted. Tokens of prompts
are not: a draft reads them through its embedding, which no cut of the head touches, and what users
write is not what a target answers. They only say which of the tokens that were never said come
first.

This module knows tokens and prompts, neither drafts nor rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..traces.near_duplicates import PromptText, independent_groups
from ..traces.prompt_trace import prompt_sha256
from ..traces.trace_folder import TraceFolder

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaidText:
    """What the target said on one prompt.

    Attributes:
        group: the same for prompts that belong together: copies, near duplicates, turns of a
            conversation, prompts of a declared cluster.
        prompt: int64, the tokens of the prompt.
        token_ids: int64, the tokens that a draft was to propose behind it.
    """

    id: str
    category: str
    group: int
    prompt: NDArray[np.int64]
    token_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCounts:
    """How often each token was said, by category.

    Attributes:
        categories: C names, ascending.
        by_category: [C, V] int64.
        of_prompts: [V] int64, how often it stands in a prompt.
    """

    categories: tuple[str, ...]
    by_category: Counts
    of_prompts: Counts

    @classmethod
    def of(cls, texts: Collection[SaidText], vocab_size: int) -> "TokenCounts":
        """The counts of some texts, of a target with so many tokens."""
        categories = tuple(sorted({text.category for text in texts}))
        said = np.zeros((len(categories), vocab_size), dtype=np.int64)
        read = np.zeros(vocab_size, dtype=np.int64)
        for text in texts:
            np.add.at(said[categories.index(text.category)], text.token_ids, 1)
            np.add.at(read, text.prompt, 1)
        return cls(categories=categories, by_category=said, of_prompts=read)

    @property
    def pooled(self) -> Counts:
        """[V] of all categories."""
        sums: Counts = self.by_category.sum(axis=0)
        return sums


def said_texts(traces: TraceFolder) -> list[SaidText]:
    """What the target said on every prompt, in order; reads token ids only.

    Raises:
        TraceError: the shard's bytes changed since recording.
    """
    read = [(entry, ids.numpy().astype(np.int64)) for entry, ids in traces.token_ids()]
    texts = []
    for entry, ids in read:
        prompt = tuple(ids[: entry.prompt_length].tolist())
        texts.append(
            PromptText(
                category=entry.category,
                prompt=prompt,
                continuation=tuple(ids[entry.prompt_length :].tolist()),
                cluster=entry.conversation_sha256 or prompt_sha256(prompt),
                declared=entry.cluster,
            )
        )
    group_of = _group_of(independent_groups(texts))
    return [
        SaidText(
            id=entry.id,
            category=entry.category,
            group=group_of[place],
            prompt=ids[: entry.prompt_length],
            token_ids=ids[entry.prompt_length + 1 :],
        )
        for place, (entry, ids) in enumerate(read)
    ]


def _group_of(groups: Sequence[Sequence[int]]) -> dict[int, int]:
    return {place: number for number, group in enumerate(groups) for place in group}


def folds_of(texts: Sequence[SaidText], number: int) -> list[int]:
    """The fold of every text: groups are kept together, and each category is spread over all.

    Args:
        texts: in an order that stays the same.
        number: of folds; fewer are used where there are fewer groups.
    """
    first = {text.group: text.category for text in reversed(texts)}
    fold_of_group: dict[int, int] = {}
    for place, group in enumerate(sorted(first, key=lambda group: (first[group], group))):
        fold_of_group[group] = place % number
    return [fold_of_group[text.group] for text in texts]
