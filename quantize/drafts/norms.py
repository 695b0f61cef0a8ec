"""Which norms of a draft stand in front of quantized linears: for every family, by their names.

Their weights may learn beside the codes (`norms: learned`). What is behind them rounds its inputs
and its weights anyway, so that nothing that was exact is lost but the norm itself. A norm in front
of anything that is kept stays as it is: of fc, of the head, of a router, of `kv_b_proj`.
"""

from collections.abc import Collection, Mapping

from .family import Draft, Row
from .fused import GATE_UP, MLA_DOWN, QKV

MOST_OF_NORM = 2.0
"""By which an element of a norm's weight may be multiplied or divided, at most, when it learns. A
power of two: rounding to the dtype of the norm cannot lead beyond it."""
_ATTENTION = (*QKV.members, *MLA_DOWN.members)
_READERS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": _ATTENTION,
    "hidden_norm": _ATTENTION,
    "post_attention_layernorm": GATE_UP.members,
    "q_a_layernorm": ("q_b_proj",),
    "kv_a_layernorm": ("kv_b_proj",),
}
"""Last part of a norm's name -> those of the linears of its layer that read it."""


def norms_before(draft: Draft, quantized: Collection[str]) -> tuple[Row, ...]:
    """The weights of norms that only quantized linears read, and residual streams, in file order.
    """
    return tuple(row for row in draft.rows if row.role == "norm" and _learns(row, draft, quantized))


def _learns(norm: Row, draft: Draft, quantized: Collection[str]) -> bool:
    layer, leaf = _layer(norm), _leaf(norm)
    if layer is None or not norm.canonical.endswith(".weight") or leaf not in _READERS:
        return False
    inside = [row for row in draft.rows if _layer(row) == layer]
    routed = leaf == "post_attention_layernorm" and any(row.role == "router" for row in inside)
    readers = [row for row in inside if _leaf(row) in _READERS[leaf]]
    return bool(readers) and not routed and all(row.module in quantized for row in readers)


def _layer(row: Row) -> str | None:
    """Its number; None outside the layers."""
    root, number, *_ = (*row.canonical.split("."), "")
    return number if root == "layers" else None


def _leaf(row: Row) -> str:
    return row.canonical.removesuffix(".weight").rpartition(".")[2]
