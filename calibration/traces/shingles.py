"""Texts as sets of shingles, samples of these (sketches), and how much two texts share.

A shingle is w consecutive tokens, as a hash of 32 bits: 4 of a prompt, so that a changed token
costs 4 shingles and not 16, and 16 of a continuation, because different ones share short phrases.
A text of fewer than 16 tokens is one shingle, so that only its copies share it. The 64 smallest
hashes of a text are its sketch: a sample of its shingles, drawn in the same way from every text, so
that two texts keep the same common ones.

hash = the upper 32 bits of f(h_w), h_0 = 0, h_j = h_(j-1) * 0x9E3779B97F4A7C15 + token_j + 1
f(h): h ^= h >> 30, h *= 0xBF58476D1CE4E5B9, h ^= h >> 27, h *= 0x94D049BB133111EB, h ^= h >> 31

in 64 bits (f is the finalizer of SplitMix64). It is part of `Sketches.method`: files keep it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.uint32]  # distinct hashes, ascending

WIDTH = 16  # of continuations
PROMPT_WIDTH = 4
SKETCH = 64
SHARED_SHARE = 0.9
_LEAST_SAMPLE = 8  # values of a sketch that is a sample: with fewer an overlap is no estimate
_LEAST_DOCUMENTS = 3  # with fewer, what they share may as well make them copies of each other
_LEAST_OWN = 4
"""Shingles besides a template: with fewer, a text is the template, changed at one edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shingled:
    """One text; what a document's texts share is not a template of their category."""

    category: str
    document: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """The smallest values of one text."""

    category: str
    values: Values

    @classmethod
    def parsed(cls, category: str, text: str) -> "Sketch":
        """From a sketch as stored."""
        values = np.frombuffer(bytes.fromhex(text), dtype=">u4").astype(np.uint32)
        return cls(category=category, values=np.unique(values))

    @property
    def text(self) -> str:
        """The sketch as stored."""
        return self.values.astype(">u4").tobytes().hex()

    @property
    def largest_known(self) -> int | None:
        """The value up to which it knows its text; None = it knows all of it."""
        return int(self.values[-1]) if len(self.values) >= SKETCH else None


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


class Templates:
    """What most texts have in common: all of them, and those of each category.

    That is a shingle of more than half of the documents, of three or more; sketches of absent
    texts count with the available ones, which are then also counted alone.
    """

    def __init__(self, texts: Iterable[Shingled], sketches: Iterable[Sketch] = ()) -> None:
        documents: dict[str, dict[str, list[Values]]] = {}
        for text in texts:
            of_category = documents.setdefault(text.category, {})
            of_category.setdefault(text.document, []).append(text.values)
        absent: dict[str, list[Values]] = {}
        for sketch in sketches:
            absent.setdefault(sketch.category, []).append(sketch.values)
        of_all: list[Values] = []
        others_of_all: list[Values] = []
        self._of: dict[str, Values] = {}
        for category in documents.keys() | absent.keys():
            parts = documents.get(category, {}).values()
            distinct = [np.unique(np.concatenate(part)) for part in parts]
            others = absent.get(category, [])
            self._of[category] = _of_most(distinct, others)
            of_all += distinct
            others_of_all += others
        self._of_all = _of_most(of_all, others_of_all)

    def own(self, values: Values, category: str, least: int) -> Values:
        """The shingles of a text that do not belong to a template; all, where these are few."""
        template = self._of.get(category, self._of_all[:0])
        rest = values[~np.isin(values, self._of_all) & ~np.isin(values, template)]
        return rest if len(rest) >= least else values


def sketches_of(texts: Sequence[Shingled], templates: Templates) -> list[Sketch]:
    """The sketch of each text, without templates."""
    return [
        Sketch(
            category=text.category,
            values=templates.own(text.values, text.category, _LEAST_OWN)[:SKETCH],
        )
        for text in texts
    ]


def overlapping(
    texts: Sequence[Shingled], sketches: Sequence[Sketch], templates: Templates
) -> Iterator[tuple[int, int]]:
    """Positions of a sketch and of a text that share 90 % of the shorter, without templates."""
    overlaps = Overlaps([templates.own(text.values, text.category, _LEAST_OWN) for text in texts])
    for number, sketch in enumerate(sketches):
        largest = sketch.largest_known
        least = _LEAST_OWN if largest is None else _LEAST_SAMPLE
        kept = templates.own(sketch.values, sketch.category, least)
        shared = overlaps.with_sketch(kept, largest=largest) >= SHARED_SHARE
        yield from ((number, position) for position in shared.nonzero()[0].tolist())


class Overlaps:
    """How much of each of many texts is in another one."""

    def __init__(self, texts: Sequence[Values]) -> None:
        self._count = len(texts)
        values = np.concatenate([*texts, np.zeros(0, dtype=np.uint32)])
        owners = np.repeat(np.arange(len(texts)), [len(each) for each in texts])
        order = np.argsort(values)
        self._values, self._owners = values[order], owners[order]
        self._sizes = self._of_each(self._owners)

    def with_sketch(self, sketch: Values, *, largest: int | None) -> NDArray[np.float64]:
        """[N] estimated share of the shorter of the two that is in both, in [0, 1].

        `largest`: value of the sketch, up to which it knows that text; None = it knows all.
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


def _of_most(documents: Sequence[Values], others: Sequence[Values]) -> Values:
    """Shingles of more than half of some documents, and of more than half of these and others."""
    return np.union1d(_frequent(documents), _frequent([*documents, *others]))


def _frequent(documents: Sequence[Values]) -> Values:
    if len(documents) < _LEAST_DOCUMENTS:
        return np.zeros(0, dtype=np.uint32)
    values, counts = np.unique(np.concatenate(documents), return_counts=True)
    return values[counts > len(documents) / 2]
