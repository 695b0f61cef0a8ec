"""The Llama form of EAGLE-3: `LlamaForCausalLMEagle3`."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from .corpus import END_OF_TEXT_ID
from .eagle3 import ChainAttention, Eagle3Draft, Eagle3Size
from .rotary import rotate
from .target import INITIALIZER_RANGE, TargetSize


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaEagle3Size(Eagle3Size):
    """Shape of a Llama-style EAGLE-3 draft."""

    num_key_value_heads: int = 4
    head_dim: int = 32


class LlamaChainAttention(ChainAttention):
    """Grouped-query attention with neox rotary embedding, 2 * hidden_size wide at its input."""

    def __init__(self, hidden_size: int, size: LlamaEagle3Size, rope_theta: float) -> None:
        super().__init__()
        query_size = size.num_attention_heads * size.head_dim
        key_value_size = size.num_key_value_heads * size.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)
        self.head_dim = size.head_dim
        self.queries_per_key = size.num_attention_heads // size.num_key_value_heads
        self.rope_theta = rope_theta
        self.scale = size.head_dim**-0.5

    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ChainAttention.project`."""
        queries, keys, values = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = rotate(queries, positions, self.rope_theta)
        keys = rotate(keys, positions, self.rope_theta)
        return (
            queries,
            keys.repeat_interleave(self.queries_per_key, dim=1),
            values.repeat_interleave(self.queries_per_key, dim=1),
        )


class LlamaEagle3Draft(Eagle3Draft):
    """A Llama-style EAGLE-3 draft; norms and rotary base are the target's."""

    def __init__(
        self, target: PreTrainedModel, target_size: TargetSize, size: LlamaEagle3Size
    ) -> None:
        attention = LlamaChainAttention(target_size.hidden_size, size, target_size.rope_theta)
        super().__init__(target, target_size, size, attention)
        self.target_size, self.size = target_size, size

    def published_config(self) -> Mapping[str, object]:
        """See `Draft.published_config`; auxiliary layer ids name the layer whose output is read."""
        target = self.target_size
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": target.hidden_size,
            "intermediate_size": self.size.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.size.num_attention_heads,
            "num_key_value_heads": self.size.num_key_value_heads,
            "head_dim": self.size.head_dim,
            "rms_norm_eps": self.size.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rope_theta": target.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": INITIALIZER_RANGE,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "tie_word_embeddings": False,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.size.aux_layer_ids),
                "use_aux_hidden_state": True,
            },
        }
