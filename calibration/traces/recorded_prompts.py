"""Which prompts a trace folder holds, as a record keeps them and as the gate looks for them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.seen_prompts import SeenPrompts, Sketches
from .manifest import TraceEntry
from .prompt_trace import prompt_sha256
from .shingles import PROMPT_WIDTH, Shingled, Templates, shingles, sketch_text
from .trace_folder import TraceFolder

_LEAST_CONTINUED = 16
"""Different shingles of a continuation: 31 tokens or more, and no loop of a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt of a folder.

    Attributes:
        sha256: of its own token ids, see `prompt_sha256`.
        conversation_known: it is a first turn, or the folder has the first turn that it names, or
            its own token ids begin with that.
        token_ids, continuation: of the prompt, and what the target wrote.
    """

    entry: TraceEntry
    sha256: str
    conversation_known: bool
    token_ids: Sequence[int]
    continuation: Sequence[int]

    @property
    def hashes(self) -> tuple[str, str]:
        """Of its own token ids, and of the first turn of its conversation."""
        return self.sha256, self.entry.conversation_sha256 or self.sha256

    def shingled(self, width: int | None) -> Shingled:
        """The shingles of its prompt; without a width, those of its continuation.

        A short continuation has none, because different prompts have it alike.
        """
        values = shingles(self.token_ids, width) if width else shingles(self.continuation)
        if width is None and len(values) < _LEAST_CONTINUED:
            values = values[:0]
        document = self.entry.cluster or self.hashes[1]
        return Shingled(category=self.entry.category, document=document, values=values)


def recorded_prompts(traces: TraceFolder) -> list[RecordedPrompt]:
    """Every prompt, in order; reads token ids only.

    Raises:
        TraceError: the shard's bytes changed since recording.
    """
    cut = [(entry, ids.tolist(), entry.prompt_length) for entry, ids in traces.token_ids()]
    prompts = [(entry, ids[:n], ids[n:], prompt_sha256(ids[:n])) for entry, ids, n in cut]
    first_turns = {own for entry, *_, own in prompts if entry.conversation_sha256 is None}
    return [
        RecordedPrompt(
            entry=entry,
            sha256=own,
            conversation_known=(conversation := entry.conversation_sha256 or own) in first_turns
            or _begins_with(ids, conversation),
            token_ids=ids,
            continuation=continuation,
        )
        for entry, ids, continuation, own in prompts
    ]


def seen_prompts(traces: TraceFolder) -> SeenPrompts:
    """The prompts of a folder, for the record of what is made by them.

    Raises:
        TraceError: the shard's bytes changed since recording.
    """
    prompts = recorded_prompts(traces)
    return SeenPrompts(
        sha256=tuple(sorted({digest for prompt in prompts for digest in prompt.hashes})),
        sketches=Sketches(
            method="64 minima of 4-token shingles, of 16-token ones of continuations, 2",
            minima=_minima([prompt.shingled(PROMPT_WIDTH) for prompt in prompts]),
            continuations=_minima([prompt.shingled(None) for prompt in prompts]),
        ),
    )


def _minima(texts: Sequence[Shingled]) -> dict[str, tuple[str, ...]]:
    """Category -> sketches, ascending, of the texts that have shingles."""
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
