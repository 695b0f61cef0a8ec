"""The linears of one decoder layer as engines build them: fused, and split by shards."""

from collections.abc import Callable

from ..drafts.engine_traits import EngineTraits, Sharding
from ..drafts.fused import GATE_UP, MLA_DOWN, QKV, FusedLinear

Linear = tuple[str, tuple[str, ...], Sharding]
"""Path in the layer, canonical names of the parts, sharding."""


def layer_linears(
    traits: EngineTraits, layer: str, name: Callable[[FusedLinear], str], *, mlp: str = "mlp"
) -> list[Linear]:
    """Those of one layer, in order.

    Args:
        layer: canonical name of the layer, "layers.0".
        mlp: the block with gate, up and down, of a mixture that every token sees.
    """

    def fused(block: str, linear: FusedLinear, sharding: Sharding) -> Linear:
        parts = tuple(f"{layer}.{block}.{member}" for member in linear.members)
        return f"{block}.{name(linear)}", parts, sharding

    def alone(block: str, leaf: str, sharding: Sharding) -> Linear:
        return f"{block}.{leaf}", (f"{layer}.{block}.{leaf}",), sharding

    mla = [
        fused("self_attn", MLA_DOWN, "replicated"),
        alone("self_attn", "q_b_proj", "column"),
        alone("self_attn", "kv_b_proj", "column"),
    ]
    return [
        *(mla if traits.latent else [fused("self_attn", QKV, "column")]),
        alone("self_attn", "o_proj", "row"),
        fused(mlp, GATE_UP, "column"),
        alone(mlp, "down_proj", "row"),
        *(alone(conv, "kernel_projection", "replicated") for conv in traits.convolutions),
    ]
