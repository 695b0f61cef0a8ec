"""Medusa: what of a folder the engine that had it would have served."""

from collections.abc import Iterator

from ..drafts import Draft
from .lint import Lint
from .marks import is_medusa


def served(draft: Draft) -> Iterator[Lint]:
    """Source: registries of vLLM 0.32 and 0.33; `models/medusa.py:19-29` of the former."""
    if is_medusa(draft):
        yield Lint(
            name="medusa-served",
            level="note",
            cause="vLLM 0.33 and SGLang 0.5.23 have no Medusa; vLLM 0.32 serves it in floats, for"
            " its blocks and heads take no quantization",
            remedy="serve what is quantized as its decoded weights: draftquant dequantize",
        )


def biases(draft: Draft) -> Iterator[Lint]:
    """FasterDecoding trains every block with a bias, and says so nowhere.

    Source: `medusa_model.py` of FasterDecoding/Medusa; vLLM 0.32 `models/medusa.py:28,173`.
    """
    stored = [row for row in draft.rows if row.canonical.endswith(".bias")]
    if is_medusa(draft) and stored and not draft.checkpoint.config.get("medusa_fc_bias"):
        yield Lint(
            name="medusa-biases",
            level="warning",
            cause=f"{len(stored)} biases are stored, and medusa_fc_bias is not true: vLLM 0.32"
            " drops them without a word",
            remedy="write medusa_fc_bias true",
            fix={"medusa_fc_bias": True},
        )


def names(draft: Draft) -> Iterator[Lint]:
    """Source: `load_weights` of vLLM 0.32 `models/medusa.py:129-178`."""
    unread = [row.tensor.name for row in draft.rows if _unread(row.tensor.name)]
    if is_medusa(draft) and unread:
        yield Lint(
            name="medusa-names",
            level="warning",
            cause=f"{len(unread)} tensors are named like {unread[0]}: vLLM 0.32 drops them without"
            " a word, and proposes from what was in memory",
            remedy="rename the tensors of the source: blocks.0.layers.0.weight, lm_heads.0.weight",
        )


def _unread(name: str) -> bool:
    """It strips medusa_heads. and knows two numbers in a row."""
    return name.startswith("medusa_head.") or "medusa_layers" in name or ".lm_head." in name
