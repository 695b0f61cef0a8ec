"""The weights of a layer's attention: grouped-query, or latent (MLA)."""

from typing import Any

from .....recipes.schema import Role
from ...config_reader import ConfigReader
from ...family import Dim

Shapes = dict[str, tuple[Role, tuple[Dim, ...]]]
"""Name below "layers.N." of a tensor, or of the module whose weight it is -> role and shape."""


def grouped_shapes(g: Any, width: Dim) -> Shapes:
    """Q, k, v and o.

    Args:
        width: of the rows that q, k and v read.
    """
    queries = Dim(g.num_attention_heads * g.head_dim, "num_attention_heads x head_dim")
    keys = Dim(g.num_key_value_heads * g.head_dim, "num_key_value_heads x head_dim")
    return {
        "self_attn.q_proj": ("attention", (queries, width)),
        "self_attn.k_proj": ("attention", (keys, width)),
        "self_attn.v_proj": ("attention", (keys, width)),
        "self_attn.o_proj": ("attention", (Dim(g.hidden_size, "hidden_size"), queries)),
    }


def latent_shapes(g: Any, width: Dim) -> Shapes:
    """The down- and up-projections of DeepSeek's latent attention.

    Args:
        g: a geometry with the ranks and head widths of `Eagle3MlaGeometry`.
        width: of the rows that the down-projections read.
    """
    heads = g.num_attention_heads
    hidden = Dim(g.hidden_size, "hidden_size")
    q_latent = Dim(g.q_lora_rank, "q_lora_rank")
    kv_latent = Dim(g.kv_lora_rank, "kv_lora_rank")
    queries = Dim(
        heads * (g.qk_nope_head_dim + g.qk_rope_head_dim),
        "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
    )
    keys_values = Dim(
        heads * (g.qk_nope_head_dim + g.v_head_dim),
        "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
    )
    values = Dim(heads * g.v_head_dim, "num_attention_heads x v_head_dim")
    down = Dim(g.kv_lora_rank + g.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
    return {
        "self_attn.q_a_proj": ("attention", (q_latent, width)),
        "self_attn.q_a_layernorm": ("norm", (q_latent,)),
        "self_attn.q_b_proj": ("attention", (queries, q_latent)),
        "self_attn.kv_a_proj_with_mqa": ("attention", (down, width)),
        "self_attn.kv_a_layernorm": ("norm", (kv_latent,)),
        "self_attn.kv_b_proj": ("kv_up", (keys_values, kv_latent)),
        "self_attn.o_proj": ("attention", (hidden, values)),
    }


def head_norm_shapes(g: Any) -> Shapes:
    """The norms of each head's query and key."""
    head = Dim(g.head_dim, "head_dim")
    return {f"self_attn.{name}_norm": ("norm", (head,)) for name in ("q", "k")}


def input_bias_shapes(linears: Shapes) -> Shapes:
    """Biases of q, k and v, by whole names; vectors are kept as norms are."""
    names = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return {f"{name}.bias": ("norm", linears[name][1][:1]) for name in names}


def weight_names(shapes: Shapes) -> Shapes:
    """The same by the names of the weights."""
    return {f"{name}.weight": row for name, row in shapes.items()}


def read_latent(keys: ConfigReader) -> dict[str, Any]:
    """The fields of a geometry of latent attention, from config.json.

    Raises:
        CheckpointError: a key is missing or wrong.
    """
    return {
        "q_lora_rank": keys.positive("q_lora_rank"),
        "kv_lora_rank": keys.positive("kv_lora_rank"),
        "qk_nope_head_dim": keys.positive("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.even("qk_rope_head_dim"),
        "v_head_dim": keys.positive("v_head_dim"),
        "rope_interleave": keys.flag("rope_interleave", True),
    }
