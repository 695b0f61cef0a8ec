"""Which prompts a trace folder holds, and which of them hardly differ, so that they say less."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...quantize.files.provenance import SeenPrompts, SeenTarget, Sketches
from .manifest import TraceEntry
from .prompt_trace import PromptTrace, prompt_sha256
from .trace_folder import TraceFolder

# A shingle is w consecutive tokens, as a hash of 32 bits: 4 of a prompt, so that a changed
# token costs 4 shingles and not 16, and 16 of a continuation, because different ones share
# short phrases. A text of fewer than 16 tokens is one shingle, so that only its copies share it.
# The 64 smallest hashes of a text are its sketch: a sample of its shingles, drawn in the same way
# from every text, so that two texts keep the same common ones.
#
# hash = the upper 32 bits of f(h_w), h_0 = 0, h_j = h_(j-1) * 0x9E3779B97F4A7C15 + token_j + 1
# f(h): h ^= h >> 30, h *= 0xBF58476D1CE4E5B9, h ^= h >> 27, h *= 0x94D049BB133111EB, h ^= h >> 31
#
# in 64 bits (f is the finalizer of SplitMix64). It is part of `Sketches.method`: files keep it.

Values = NDArray[np.uint32]  # distinct hashes, ascending

WIDTH = 16  # of continuations
PROMPT_WIDTH = 4
SKETCH = 64
_LEAST_SAMPLE = 8  # values of a sketch that is a sample: with fewer an overlap is no estimate
_LEAST_DOCUMENTS = 3  # with fewer, what they share may as well make them copies of each other
_LEAST_OWN = 4
"""Shingles besides a template: with fewer, a prompt is the template, changed at one edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shingled:
    """One prompt; what a document's prompts share is not a template of their category."""

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
    """The sketch of a prompt as stored."""
    return own[:SKETCH].astype(">u4").tobytes().hex()


def parsed_sketch(text: str) -> Values:
    """The values of a stored sketch."""
    return np.unique(np.frombuffer(bytes.fromhex(text), dtype=">u4").astype(np.uint32))


class Templates:
    """What most prompts have in common: all of them, and those of each category.

    That is a shingle of more than half of the documents, of three or more; sketches of absent
    prompts count with the available prompts, which are then also counted alone.
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
        """The shingles of a prompt that do not belong to a template."""
        template = self._of.get(category, self._of_all[:0])
        rest = values[~np.isin(values, self._of_all) & ~np.isin(values, template)]
        return rest if sample or len(rest) >= _LEAST_OWN else values


class Overlaps:
    """How much of each of many prompts is in another one."""

    def __init__(self, own: Sequence[Values]) -> None:
        self._count = len(own)
        values = np.concatenate([*own, np.zeros(0, dtype=np.uint32)])
        owners = np.repeat(np.arange(len(own)), [len(each) for each in own])
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]
        self._sizes = self._of_each(self._owners)

    def with_sketch(self, sketch: Values, *, largest: int | None) -> NDArray[np.float64]:
        """[N] estimated share of the shorter of the two that is in both, in [0, 1].

        `largest`: value of the sketch, up to which it knows that prompt; None = it knows all.
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
    """The value up to which a stored sketch knows its prompt; None = it knows all of it."""
    return int(sketch[-1]) if len(sketch) >= SKETCH else None


def _of_most(own: Sequence[Values], others: Sequence[Values]) -> Values:
    """Shingles of more than half of some documents, and of more than half of these and others."""
    return np.union1d(_frequent(own), _frequent([*own, *others]))


def _frequent(documents: Sequence[Values]) -> Values:
    if len(documents) < _LEAST_DOCUMENTS:
        return np.zeros(0, dtype=np.uint32)
    values, counts = np.unique(np.concatenate(documents), return_counts=True)
    return values[counts > len(documents) / 2]


SHARED_SHARE = 0.9
MIN_PROMPTS_OF_A_TASK = 10
"""With fewer prompts, what they share may as well mean that they are near duplicates."""
_LEAST_CONTINUED = 16
"""Different shingles of a continuation: 31 tokens or more, and no loop of a few."""
Alike = tuple[tuple[int, ...], tuple[int, ...]]  # two prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """Token ids of one prompt and of the target's continuation."""

    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cluster: str | None = None  # the same for turns of one conversation: no duplicates
    declared: str | None = None  # for prompts that their author declares as belonging together

    def shingled(self, width: int | None) -> Shingled:
        """The shingles of its prompt; without a width, those of its continuation.

        A short continuation has none, because different prompts share it.
        """
        values = shingles(self.prompt, width) if width else shingles(self.continuation)
        if width is None and len(values) < _LEAST_CONTINUED:
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


def num_near_duplicates(texts: Iterable[PromptText]) -> int:
    """Prompts beyond the first of each group of near duplicates; copies are not counted.

    Two prompts are alike if they begin with the same tokens for at least 90 % of the shorter,
    not counting those of a template: the tokens with which all prompts begin, or all of a category
    with ten or more, so that a system prompt or a task's examples make no near duplicates. Sorted,
    each prompt is beside the one with which it shares most, and only neighbours are compared.
    They are also alike if 90 % of the shingles of the shorter, without those of templates, are in
    the other, whatever its first token is. Two prompts with the same continuation are alike too.
    """
    distinct = {text.prompt: text for text in texts}
    return len(distinct) - len(_united(distinct, _alike(distinct)))


def independent_groups(texts: Sequence[PromptText]) -> list[list[int]]:
    """Positions of texts that belong together, in the order of their first members.

    Copies belong together, as do turns of a conversation, near duplicates, and declared clusters.
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
    """As `independent_groups`, by texts alone: conversations and clusters are only claims."""
    return independent_groups([replace(text, cluster=None, declared=None) for text in texts])


def _united(
    prompts: Iterable[tuple[int, ...]], pairs: Iterable[Alike]
) -> list[list[tuple[int, ...]]]:
    groups = {prompt: [prompt] for prompt in prompts}  # shared by all members of a group
    for one, other in pairs:
        if groups[one] is not groups[other]:
            joined = groups[one] + groups[other]
            groups |= dict.fromkeys(joined, joined)
    return list({id(group): group for group in groups.values()}.values())


def _alike(distinct: Mapping[tuple[int, ...], PromptText]) -> Iterator[Alike]:
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
    """Pairs whose shorter prompt is in the longer: a sketch of one, all shingles of both."""
    texts = list(distinct.values())
    prompts = [text.shingled(PROMPT_WIDTH) for text in texts]
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
    """How many tokens the prompts of each category have in front of their own text."""
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


def _are_groups(found: Iterable[str]) -> bool:
    names = list(found)
    return _LEAST_GROUPS <= len(set(names)) <= len(names) / 2


def _sentence(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"The {what} look like {len(names)} groups ({shown}). If prompts of a group share a"
        ' document, a task or a user, declare it as "cluster" in the prompt file: undeclared, the'
        " bounds are too narrow."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt of a folder.

    `conversation_known`: it is a first turn, or the folder has the first turn that it names, or its
    own token ids begin with that.
    """

    entry: TraceEntry
    text: PromptText
    sha256: str
    conversation_known: bool

    @property
    def hashes(self) -> tuple[str, str]:
        """Hashes of its own token ids, and of the first turn of its conversation."""
        return self.sha256, self.entry.conversation_sha256 or self.sha256


def recorded_prompts(traces: TraceFolder) -> list[RecordedPrompt]:
    """Every prompt, in order; reads token ids only."""
    texts = [(entry, text_of(entry, ids.tolist())) for entry, ids in traces.token_ids()]
    own = [prompt_sha256(text.prompt) for _, text in texts]
    first_turns = {
        digest
        for (entry, _), digest in zip(texts, own, strict=True)
        if entry.conversation_sha256 is None
    }
    return [
        RecordedPrompt(
            entry=entry,
            text=text,
            sha256=digest,
            conversation_known=(conversation := entry.conversation_sha256 or digest) in first_turns
            or _begins_with(text.prompt, conversation),
        )
        for (entry, text), digest in zip(texts, own, strict=True)
    ]


def seen_prompts(traces: TraceFolder) -> SeenPrompts:
    """The prompts of a folder, for the record of what they make."""
    prompts = recorded_prompts(traces)
    return SeenPrompts(
        sha256=tuple(sorted({digest for prompt in prompts for digest in prompt.hashes})),
        sketches=Sketches(
            method="64 minima of 4-token shingles, of 16-token ones of continuations, 2",
            minima=_minima([prompt.text.shingled(PROMPT_WIDTH) for prompt in prompts]),
            continuations=_minima([prompt.text.shingled(None) for prompt in prompts]),
        ),
        target=seen_target(traces),
    )


def seen_target(traces: TraceFolder) -> SeenTarget:
    """The target of a folder, for the same record."""
    own = traces.manifest.target
    return SeenTarget(
        name=own.name, config_sha256=own.config_sha256, weights_sha256=own.weights_sha256
    )


def _minima(texts: Sequence[Shingled]) -> dict[str, tuple[str, ...]]:
    templates = Templates(texts)
    found: dict[str, set[str]] = {}
    for text in texts:
        if len(text.values):
            sketch = sketch_text(templates.own(text.values, text.category))
            found.setdefault(text.category, set()).add(sketch)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def _begins_with(token_ids: Sequence[int], digest: str) -> bool:
    """Whether `digest` is the `prompt_sha256` of the first of these tokens, however many."""
    hashed = hashlib.sha256()
    for place, token in enumerate(token_ids):
        hashed.update(f"{',' if place else ''}{token}".encode())
        if hashed.hexdigest() == digest:
            return True
    return False
