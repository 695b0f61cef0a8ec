"""How a family says that a draft proposes fewer tokens than its target has."""

from typing import NamedTuple


class ReducedVocabulary(NamedTuple):
    """Where config.json and the tensors say it.

    Attributes:
        key: of config.json, at its top level in every layout: the rows of the head.
        map: canonical name of the table from draft ids to target ids.
        offsets: it holds target id - draft id; else the target ids themselves.
        mask: canonical name of the table that marks the target ids which have a row.
    """

    key: str
    map: str
    offsets: bool
    mask: str | None


OFFSETS = ReducedVocabulary(key="draft_vocab_size", map="d2t", offsets=True, mask="t2d")
"""Of EAGLE-3, DFlash and DSpark: SpecForge, ModelOpt, speculators, vLLM and SGLang."""
IDS = ReducedVocabulary(key="truncated_vocab_size", map="token_map", offsets=False, mask=None)
"""Of Medusa, as vLLM 0.32 reads it."""
