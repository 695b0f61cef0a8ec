"""Which prompts a trace folder holds, as a record keeps them and as the gate looks for them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.seen_prompts import SeenPrompts, Sketches
from .manifest import TraceEntry
from .prompt_trace import prompt_sha256
from .shingles import Shingled, Templates, shingles, sketch_text
from .trace_folder import TraceFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt of a folder.

    Attributes:
        sha256: of its own token ids, see `prompt_sha256`.
        conversation_known: it is a first turn, or the folder has the first turn that it names, or
            its own token ids begin with that.
        shingled: its shingles.
    """

    entry: TraceEntry
    sha256: str
    conversation_known: bool
    shingled: Shingled

    @property
    def hashes(self) -> tuple[str, str]:
        """Of its own token ids, and of the first turn of its conversation."""
        return self.sha256, self.entry.conversation_sha256 or self.sha256


def recorded_prompts(traces: TraceFolder) -> list[RecordedPrompt]:
    """Every prompt, in order; reads token ids only.

    Raises:
        TraceError: the shard's bytes changed since recording.
    """
    prompts = [(entry, ids, prompt_sha256(ids)) for entry, ids in traces.prompt_token_ids()]
    first_turns = {own for entry, _, own in prompts if entry.conversation_sha256 is None}
    return [
        RecordedPrompt(
            entry=entry,
            sha256=own,
            conversation_known=(conversation := entry.conversation_sha256 or own) in first_turns
            or _begins_with(ids, conversation),
            shingled=Shingled(
                category=entry.category,
                document=entry.cluster or conversation,
                values=shingles(ids),
            ),
        )
        for entry, ids, own in prompts
    ]


def seen_prompts(traces: TraceFolder) -> SeenPrompts:
    """The prompts of a folder, for the record of what is made by them.

    Raises:
        TraceError: the shard's bytes changed since recording.
    """
    prompts = recorded_prompts(traces)
    templates = Templates(prompt.shingled for prompt in prompts)
    minima: dict[str, set[str]] = {}
    for prompt in prompts:
        sketch = sketch_text(templates.own(prompt.shingled.values, prompt.entry.category))
        minima.setdefault(prompt.entry.category, set()).add(sketch)
    return SeenPrompts(
        sha256=tuple(sorted({digest for prompt in prompts for digest in prompt.hashes})),
        sketches=Sketches(minima={name: tuple(sorted(minima[name])) for name in sorted(minima)}),
    )


def _begins_with(token_ids: Sequence[int], digest: str) -> bool:
    """Whether `digest` is the `prompt_sha256` of the first of these tokens, however many."""
    hashed = hashlib.sha256()
    for place, token in enumerate(token_ids):
        hashed.update(f"{',' if place else ''}{token}".encode())
        if hashed.hexdigest() == digest:
            return True
    return False
