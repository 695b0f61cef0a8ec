"""Shingles: what prompts have in common wherever it stands in them, apart from their templates.

A shingle is w consecutive tokens, by a hash of 32 bits: 4 of a prompt, so that a token that was
changed costs 4 shingles and not 16, and 16 of a continuation, because different ones are alike in
short phrases. A text of fewer than 16 tokens is one shingle, so that only its copies share it. The
64 smallest of a text are its sketch: a sample of its shingles that is drawn alike of every text, so
that of two texts the same ones are kept.

    hash = the upper 32 bits of f(h_w), h_0 = 0, h_j = h_(j-1) * 0x9E3779B97F4A7C15 + token_j + 1
    f(h): h ^= h >> 30, h *= 0xBF58476D1CE4E5B9, h ^= h >> 27, h *= 0x94D049BB133111EB, h ^= h >> 31

in 64 bits (f is the finalizer of SplitMix64). It is part of `Sketches.method`: files keep it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.uint32]
"""Distinct hashes, ascending."""

WIDTH = 16
"""Of continuations, and of prompts in the records of earlier versions."""
PROMPT_WIDTH = 4
SKETCH = 64
_LEAST_SAMPLE = 8
"""Values of a sketch that is a sample: of fewer an overlap is no estimate."""
_LEAST_DOCUMENTS = 3
"""Of fewer, what they share is as well what makes them copies of each other."""
_LEAST_OWN = 4
"""Shingles beside a template: with fewer a prompt is the template, changed at one edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shingled:
    """One prompt.

    Attributes:
        category: of the prompt, whose prompts may share a template.
        document: the same for turns of one conversation and for prompts of a declared cluster: what
            they share is no template.
    """

    category: str
    document: str
    values: Values


def shingles(token_ids: Sequence[int], width: int = WIDTH) -> Values:
    """The shingles of a text; at least one."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    width = width if len(tokens) >= WIDTH else len(tokens)
    hashed = np.zeros(len(tokens) - width + 1, dtype=np.uint64)
    for place in range(width):
        hashed *= np.uint64(0x9E3779B97F4A7C15)
        hashed += tokens[place : place + len(hashed)] + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    return np.unique((hashed >> np.uint64(32)).astype(np.uint32))


def sketch_text(own: Values) -> str:
    """The sketch of a prompt as it is stored."""
    return own[:SKETCH].astype(">u4").tobytes().hex()


def parsed_sketch(text: str) -> Values:
    """The values of a stored sketch."""
    return np.unique(np.frombuffer(bytes.fromhex(text), dtype=">u4").astype(np.uint32))


class Templates:
    """What most prompts have in common: of all, and of each category.

    That is a shingle of more than half of the documents, of three or more; sketches of prompts that
    are not at hand count with those that are, and once more these are asked alone.

    Args:
        sketches: category -> sketches of others.
    """

    def __init__(
        self, prompts: Iterable[Shingled], sketches: Mapping[str, Sequence[Values]] | None = None
    ) -> None:
        texts: dict[str, dict[str, list[Values]]] = {}
        for prompt in prompts:
            documents = texts.setdefault(prompt.category, {})
            documents.setdefault(prompt.document, []).append(prompt.values)
        of_all: list[Values] = []
        others_of_all: list[Values] = []
        self._of: dict[str, Values] = {}
        for category in texts.keys() | (sketches or {}).keys():
            documents = texts.get(category, {})
            own = [np.unique(np.concatenate(parts)) for parts in documents.values()]
            others = list((sketches or {}).get(category, ()))
            self._of[category] = _of_most(own, others)
            of_all += own
            others_of_all += others
        self._of_all = _of_most(of_all, others_of_all)

    def own(self, values: Values, category: str, *, sample: bool = False) -> Values:
        """What is not the template's of a prompt's shingles.

        Args:
            values: all of the prompt's shingles, or some of them.
            sample: they are some; otherwise a prompt that has hardly any of its own keeps all.
        """
        template = self._of.get(category, self._of_all[:0])
        rest = values[~np.isin(values, self._of_all) & ~np.isin(values, template)]
        return rest if sample or len(rest) >= _LEAST_OWN else values


class Overlaps:
    """How much of each of many prompts is in another one.
    """

    def __init__(self, own: Sequence[Values]) -> None:
        self._count = len(own)
        values = np.concatenate([*own, np.zeros(0, dtype=np.uint32)])
        owners = np.repeat(np.arange(len(own)), [len(each) for each in own])
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]
        self._sizes = self._of_each(self._owners)

    def with_sketch(self, sketch: Values, *, largest: int | None) -> NDArray[np.float64]:
        """[N] estimated share of the shorter of the two that is in both, in [0, 1].

        Args:
            sketch: of the other prompt, without templates.
            largest: value of the sketch, up to which it knows that prompt; None = it knows all.
        """
        first = np.searchsorted(self._values, sketch, side="left")
        behind = np.searchsorted(self._values, sketch, side="right")
        hits = [self._owners[a:b] for a, b in zip(first, behind, strict=True)]
        shared = self._of_each(np.concatenate([*hits, self._owners[:0]]))
        sizes = self._sizes
        if largest is not None:
            below = np.searchsorted(self._values, np.uint32(largest), side="right")
            sizes = self._of_each(self._owners[:below])
        of_shorter = np.minimum(sizes, len(sketch))
        enough = of_shorter >= (1 if largest is None else _LEAST_SAMPLE)
        return np.where(enough, shared / np.maximum(of_shorter, 1), 0.0)

    def _of_each(self, owners: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(owners, minlength=self._count)


def largest_known(sketch: Values) -> int | None:
    """Up to which value a sketch, as it is stored, knows its prompt; None = it knows all."""
    return int(sketch[-1]) if len(sketch) >= SKETCH else None


def _of_most(own: Sequence[Values], others: Sequence[Values]) -> Values:
    """Shingles of more than half of some documents, and of more than half of these and others."""
    return np.union1d(_frequent(own), _frequent([*own, *others]))


def _frequent(documents: Sequence[Values]) -> Values:
    if len(documents) < _LEAST_DOCUMENTS:
        return np.zeros(0, dtype=np.uint32)
    values, counts = np.unique(np.concatenate(documents), return_counts=True)
    return values[counts > len(documents) / 2]
