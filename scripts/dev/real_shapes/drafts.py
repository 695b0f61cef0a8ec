"""Published drafts by name: config.json and the shapes of all tensors, written by hand.

Uses neither files nor torch, nor `quantize.drafts.families`: comparing the two compares
two sources. The totals are those of the published files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ....recipes.errors import DraftQuantError
from .configs import Config, dflash_config, llama_config, modelopt_mla_config, torchspec_mla_config

Shapes = dict[str, tuple[int, ...]]
"""On-disk name without ".weight" -> shape, in the order of writing; every tensor is BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealDraft:
    """A published draft.

    Attributes:
        repository: on the Hub.
        divisors: how many times smaller it can be made: no head is split, no latent rank becomes
            narrower than 32.
        make_config: divisor -> config.json.
        shapes: config.json -> tensors.
    """

    repository: str
    divisors: tuple[int, ...]
    make_config: Callable[[int], Config]
    shapes: Callable[[Config], Shapes]

    def config(self, divide: int = 1) -> Config:
        """config.json, with widths, heads, ranks and vocabulary `divide` times smaller."""
        if divide not in self.divisors:
            possible = ", ".join(map(str, self.divisors))
            what = f"expected one of {possible} for {self.repository}, got {divide}"
            raise DraftQuantError("divide", what, fix="give one of them")
        return self.make_config(divide)


def _llama_shapes(config: Config) -> Shapes:
    """14 tensors, by the names that TorchSpec gives them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, vocab = config["num_attention_heads"] * config["head_dim"], config["vocab_size"]
    return {
        "embed_tokens": (vocab, hidden),
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab, hidden),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.k_proj": (heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (heads, 2 * hidden),
        "norm": (hidden,),
    }


def _mla_shapes(config: Config, *, layer: str, embedding: bool) -> Shapes:
    """17 tensors, 16 without embedding; `layer` is what the exporter calls the only layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab, hidden),
        f"{layer}.hidden_norm": (hidden,),
        f"{layer}.input_layernorm": (hidden,),
        f"{layer}.mlp.down_proj": (hidden, inner),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.post_attention_layernorm": (hidden,),
        f"{layer}.self_attn.kv_a_layernorm": (kv_rank,),
        f"{layer}.self_attn.kv_a_proj_with_mqa": (kv_rank + rope, 2 * hidden),
        f"{layer}.self_attn.kv_b_proj": (heads * (nope + v), kv_rank),
        f"{layer}.self_attn.o_proj": (hidden, heads * v),
        f"{layer}.self_attn.q_a_layernorm": (q_rank,),
        f"{layer}.self_attn.q_a_proj": (q_rank, 2 * hidden),
        f"{layer}.self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "norm": (hidden,),
    }
    return {"embed_tokens": (vocab, hidden), **shapes} if embedding else shapes


def _dflash_shapes(config: Config) -> Shapes:
    """58 tensors, neither embedding nor head: both are the target's."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = config["num_attention_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (head,),
        "self_attn.k_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (head,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.v_proj": (heads, hidden),
    }
    return {
        "fc": (hidden, 5 * hidden),
        "hidden_norm": (hidden,),
        **{f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()},
        "norm": (hidden,),
    }


DEFAULT_DRAFT = "kimi-k2.5-eagle3"
REAL_DRAFTS = {
    DEFAULT_DRAFT: RealDraft(
        repository="lightseekorg/kimi-k2.5-eagle3",
        divisors=(1, 2, 4, 8, 16, 32, 64),
        make_config=llama_config,
        shapes=_llama_shapes,
    ),
    "kimi-k2.5-eagle3-mla": RealDraft(
        repository="lightseekorg/kimi-k2.5-eagle3-mla",
        divisors=(1, 2, 4, 8, 16),
        make_config=partial(torchspec_mla_config, aux_layer_ids=(1, 29, 57)),
        shapes=partial(_mla_shapes, layer="midlayer", embedding=True),
    ),
    "kimi-k2.6-eagle3-mla": RealDraft(
        repository="k-l-lambda/kimi-k2.6-eagle3-mla",
        divisors=(1, 2, 4, 8, 16),
        make_config=partial(torchspec_mla_config, aux_layer_ids=(2, 30, 58)),
        shapes=partial(_mla_shapes, layer="layers.0", embedding=True),
    ),
    "nvidia-kimi-k2.6-eagle3": RealDraft(
        repository="nvidia/Kimi-K2.6-Eagle3",
        divisors=(1, 2, 4, 8, 16),
        make_config=modelopt_mla_config,
        shapes=partial(_mla_shapes, layer="layers.0", embedding=False),
    ),
    "kimi-linear-dflash": RealDraft(
        repository="Moonlight556/Kimi-Linear-48B-A3B-DFlash-240k",
        divisors=(1, 2, 4, 8, 16, 32),
        make_config=dflash_config,
        shapes=_dflash_shapes,
    ),
}
