"""The form of EAGLE-3 with multi-head latent attention: `Eagle3DeepseekV2ForCausalLM`.

Names and config are those of TorchSpec's native export.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .corpus import END_OF_TEXT_ID
from .eagle3 import ChainAttention, Eagle3Draft, Eagle3Size
from .rotary import Yarn, rotate_pairs
from .target import TargetSize


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaEagle3Size(Eagle3Size):
    """Shape of an MLA EAGLE-3 draft.

    Like the published 576 (512 + 64), the rows of kv_a_proj_with_mqa are a multiple of 8 and not of
    128. Norms and rotary base are the draft's own, and differ from the target's: who reads the
    wrong config sees it. Auxiliary layer 1 comes first because SGLang 0.5.23 takes the nested ids
    of a DeepSeek-style target as counted after the layer only then.
    """

    rms_norm_eps: float = 1e-5
    aux_layer_ids: tuple[int, ...] = (1, 2, 3)
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    rope_theta: float = 50000.0
    yarn: Yarn = field(
        default_factory=lambda: Yarn(factor=16.0, original_max_position_embeddings=32)
    )


class MlaChainAttention(ChainAttention):
    """Multi-head latent attention, 2 * hidden_size wide at its input.

    q = q_b n(q_a x); [c; r] = kv_a x; [k; v] = kv_b n(c). A head's query and key are a plain part
    followed by a rotated part; all heads share the rotated key part, the rotated r.
    """

    def __init__(self, hidden_size: int, size: MlaEagle3Size) -> None:
        super().__init__()
        heads, eps = size.num_attention_heads, size.rms_norm_eps
        key_width = size.qk_nope_head_dim + size.qk_rope_head_dim
        plain_width = size.qk_nope_head_dim + size.v_head_dim
        latent_width = size.kv_lora_rank + size.qk_rope_head_dim
        self.q_a_proj = nn.Linear(2 * hidden_size, size.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(size.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(size.q_lora_rank, heads * key_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * hidden_size, latent_width, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(size.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(size.kv_lora_rank, heads * plain_width, bias=False)
        self.o_proj = nn.Linear(heads * size.v_head_dim, hidden_size, bias=False)
        self.size = size
        self.scale = key_width**-0.5 * size.yarn.softmax_factor()

    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ChainAttention.project`."""
        size = self.size
        frequencies = size.yarn.frequencies(size.qk_rope_head_dim, size.rope_theta)

        queries = self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs))))
        plain_queries, turned_queries = torch.split(
            queries, [size.qk_nope_head_dim, size.qk_rope_head_dim], dim=-1
        )
        latent, turned_key = torch.split(
            self.kv_a_proj_with_mqa(inputs), [size.kv_lora_rank, size.qk_rope_head_dim], dim=-1
        )
        keys_values = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        plain_keys, values = torch.split(
            keys_values, [size.qk_nope_head_dim, size.v_head_dim], dim=-1
        )

        turned_queries = rotate_pairs(turned_queries, positions, frequencies)
        turned_key = rotate_pairs(turned_key, positions, frequencies)
        turned_keys = turned_key[:, None].expand(-1, size.num_attention_heads, -1, -1)
        return (
            torch.cat((plain_queries, turned_queries), dim=-1),
            torch.cat((plain_keys, turned_keys), dim=-1),
            values,
        )

    def _heads(self, rows: Tensor) -> Tensor:
        """[N, R, heads * width] to [N, heads, R, width]."""
        return rows.view(*rows.shape[:-1], self.size.num_attention_heads, -1).transpose(1, 2)


class MlaEagle3Draft(Eagle3Draft):
    """An MLA EAGLE-3 draft, as over Kimi targets."""

    def __init__(
        self, target: PreTrainedModel, target_size: TargetSize, size: MlaEagle3Size
    ) -> None:
        attention = MlaChainAttention(target_size.hidden_size, size)
        super().__init__(target, target_size, size, attention)
        self.target_size, self.size = target_size, size

    def quantized_weights(self) -> tuple[str, ...]:
        """See `Draft.quantized_weights`; kv_b_proj stays: SGLang absorbs it in floating point."""
        return tuple(name for name in super().quantized_weights() if ".kv_b_proj." not in name)

    def published_config(self) -> Mapping[str, object]:
        """See `Draft.published_config`.

        Auxiliary layers stand there twice: the nested ids name the layer whose output is read, as
        in TorchSpec's native form, the ids at the top the layer that reads it, as in its vLLM form.
        """
        target, size = self.target_size, self.size
        return {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": target.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": size.num_attention_heads,
            "num_key_value_heads": size.num_attention_heads,
            "q_lora_rank": size.q_lora_rank,
            "kv_lora_rank": size.kv_lora_rank,
            "qk_nope_head_dim": size.qk_nope_head_dim,
            "qk_rope_head_dim": size.qk_rope_head_dim,
            "v_head_dim": size.v_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": size.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "rope_theta": size.rope_theta,
            "rope_scaling": size.yarn.published_config(),
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": END_OF_TEXT_ID,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in size.aux_layer_ids],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(size.aux_layer_ids),
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        }
