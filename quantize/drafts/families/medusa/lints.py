"""Medusa: what of a folder vLLM 0.32, the last engine that has it, leaves out."""

from collections.abc import Iterator

from ...family import Draft
from ...lint import Lint


def biases(draft: Draft) -> Iterator[Lint]:
    """FasterDecoding trains every block with a bias, and says so nowhere.

    Source: `medusa_model.py` of FasterDecoding/Medusa; vLLM 0.32 `models/medusa.py:28,173`.
    """
    stored = [row for row in draft.rows if row.canonical.endswith(".bias")]
    if stored and not draft.checkpoint.config.get("medusa_fc_bias"):
        yield Lint(
            name="medusa-biases",
            level="warning",
            cause=f"the draft stores {len(stored)} biases, but medusa_fc_bias is not true:"
            " vLLM 0.32 silently drops the biases",
            remedy="write medusa_fc_bias true",
            fix={"medusa_fc_bias": True},
        )


def names(draft: Draft) -> Iterator[Lint]:
    """Source: `load_weights` of vLLM 0.32 `models/medusa.py:129-178`."""
    unread = [row.tensor.name for row in draft.rows if _unread(row.tensor.name)]
    if unread:
        yield Lint(
            name="medusa-names",
            level="warning",
            cause=f"{len(unread)} tensors are named like {unread[0]}: vLLM 0.32 silently drops"
            " them, and proposes from uninitialized memory",
            remedy="rename the tensors of the source to blocks.0.layers.0.weight,"
            " lm_heads.0.weight and so on",
        )


def _unread(name: str) -> bool:
    """It strips medusa_heads. and knows two numbers in a row."""
    return name.startswith("medusa_head.") or "medusa_layers" in name or ".lm_head." in name


LINTS = (biases, names)
