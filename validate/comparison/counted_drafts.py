"""Several drafts, counted on the same distinct prompts: what is compared, wherever it is from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..counting.draft_counts import PromptCounts
from ..counting.jackknife import Floats
from ..errors import CompareError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One draft; prompts in an order that all drafts share.

    Attributes:
        name: for people. sha256: identity of its tensors; None = not known.
    """

    name: str
    sha256: str | None
    prompts: Sequence[PromptCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDrafts:
    """D drafts on N distinct prompts; prompts of a cluster are summed.

    Attributes:
        names: each once. sha256: None = not known.
        categories: [N] of each prompt, that of its first copy.
        tokens: [D, N] emitted tokens, float64. steps: [D, N] verify steps, at least one each.
    """

    names: tuple[str, ...]
    sha256: tuple[str | None, ...]
    categories: tuple[str, ...]
    tokens: Floats
    steps: Floats


def count_drafts(contestants: Sequence[Contestant]) -> CountedDrafts:
    """Put drafts side by side.

    Raises:
        CompareError: fewer than two drafts, one of them twice, other prompts, or hardly any.
    """
    if len(contestants) < 2:
        raise CompareError(
            "compare", f"expected two drafts or more, got {len(contestants)}", fix="give another"
        )
    _check_distinct(contestants)
    first = contestants[0]
    asked = [prompt.identity for prompt in first.prompts]
    for other in contestants[1:]:
        if [prompt.identity for prompt in other.prompts] != asked:
            raise CompareError(
                other.name,
                f"was counted on other prompts than {first.name}",
                fix="count all drafts on the same prompts",
            )
    places: dict[str, int] = {}
    categories: list[str] = []
    for prompt, *others in zip(*(each.prompts for each in contestants), strict=True):
        told = all(one.counts.num_steps for one in (prompt, *others))
        if told and prompt.counted_with not in places:
            places[prompt.counted_with] = len(places)
            categories.append(prompt.category)
    if len(places) < 2:
        raise CompareError(
            "compare",
            f"expected two distinct prompts or more with verify steps, got {len(places)}",
            fix="record or measure more prompts, or longer continuations",
        )
    tokens, steps = (np.zeros((len(contestants), len(places))) for _ in range(2))
    for row, each in enumerate(contestants):
        for prompt in each.prompts:
            column = places.get(prompt.counted_with)
            if column is not None:
                tokens[row, column] += prompt.counts.num_emitted_tokens
                steps[row, column] += prompt.counts.num_steps
    return CountedDrafts(
        names=_names(contestants),
        sha256=tuple(each.sha256 for each in contestants),
        categories=tuple(categories),
        tokens=tokens,
        steps=steps,
    )


def _check_distinct(contestants: Sequence[Contestant]) -> None:
    known: dict[str, str] = {}
    for each in contestants:
        if each.sha256 is not None:
            if each.sha256 in known:
                raise CompareError(
                    each.name,
                    f"is the same draft as {known[each.sha256]} (tensors {each.sha256[:12]})",
                    fix="give each draft once",
                )
            known[each.sha256] = each.name


def _names(contestants: Sequence[Contestant]) -> tuple[str, ...]:
    """Folders may have one name: the hash, or the place in the row, tells those apart."""
    names = [each.name for each in contestants]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({(each.sha256 or f'number {place}')[:12]})"
        for place, (name, each) in enumerate(zip(names, contestants, strict=True), 1)
    )
