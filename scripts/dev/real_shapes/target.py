"""A target as wide as a real one, but of a few plain layers: enough to time a recorder.

Knows neither files nor torch. The layers of the real one are a mixture of 384 experts.
"""

from .configs import Config
from .drafts import Shapes

NUM_LAYERS = 2


def target_config(draft: Config) -> Config:
    """A Llama of the draft's width and vocabulary, whose head is its embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": min(8, draft["num_attention_heads"]),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
        **{key: draft[key] for key in _OF_DRAFT},
    }


_OF_DRAFT = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")


def target_shapes(config: Config) -> Shapes:
    """As transformers names them."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    return {
        "model.embed_tokens": (config["vocab_size"], hidden),
        **{
            f"model.layers.{i}.{name}": shape
            for i in range(NUM_LAYERS)
            for name, shape in layer.items()
        },
        "model.norm": (hidden,),
    }
