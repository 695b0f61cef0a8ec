"""An EAGLE-3 Llama draft assembled from transformers' own modules: the oracle of our forward maths.

It shares no line with `quantize/drafts`: attention, norms, MLP, rope and the KV cache are those of
`transformers.models.llama`; only the q/k/v inputs of layer 0 are widened.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama, Eagle3LlamaGeometry
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


@contextmanager
def transformers_in_float64() -> Iterator[None]:
    """Make transformers compute norms, angles and softmax in float64 where it asks for float32.

    Without this, a float64 Llama still rounds to float32 in the middle, and two correct
    implementations agree to 1e-7 only: too coarse to tell a small error from rounding.
    """
    wide = types.SimpleNamespace(**vars(torch))
    wide.float32 = wide.float = torch.float64
    with (
        mock.patch.object(modeling_llama, "torch", wide),
        mock.patch.object(modeling_rope_utils, "torch", wide),
    ):
        yield


class ReferenceDraft(nn.Module):
    """One draft with a KV cache, fed like an engine feeds it: `extend`, then `crop`.

    Args:
        geometry: sizes and options, read by the family.
        weights: by canonical name; their dtype is the dtype of the computation.
        round_input: (canonical module name, input) -> rounded input, for activation formats.
    """

    def __init__(
        self,
        geometry: Eagle3LlamaGeometry,
        weights: Mapping[str, Tensor],
        round_input: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.geometry = g = geometry
        self.config = _llama_config(g)
        width, aux_width = g.hidden_size, g.num_aux_layers * g.target_hidden_size
        self.embed_tokens = nn.Embedding(g.vocab_size, width)
        self.fc = nn.Linear(aux_width, width, bias=False)
        if g.norm_before_fc:
            self.input_norm = LlamaRMSNorm(aux_width, g.rms_norm_eps)
        if g.fc_norm:
            norms = [LlamaRMSNorm(g.target_hidden_size, g.rms_norm_eps) for _ in range(3)]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(_layer(self.config, i) for i in range(g.num_layers))
        self.norm = LlamaRMSNorm(width, g.rms_norm_eps)
        self.lm_head = nn.Linear(width, g.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.d2t = weights.get("d2t")
        wanted = {k: v for k, v in weights.items() if k not in {"d2t", "t2d"}}
        self.to(next(iter(wanted.values())).dtype)
        self.load_state_dict(wanted)
        if round_input is not None:
            _round_inputs(self, round_input)
        self.cache = DynamicCache()

    def fuse(self, features: Tensor) -> Tensor:
        """[B, T, num_aux * W_target] -> [B, T, W]."""
        if self.geometry.norm_before_fc:
            features = self.input_norm(features)
        if self.geometry.fc_norm:
            width = self.geometry.target_hidden_size
            parts = [features[..., i * width : (i + 1) * width] for i in range(3)]
            features = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    @torch.no_grad()
    def extend(self, token_ids: Tensor, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Append rows at positions start, start + 1, ... -> (target-vocabulary logits, hidden).

        Args:
            token_ids: [B, T]. hidden: [B, T, W]. start: position of the first row.
        """
        count, past = token_ids.shape[1], self.cache.get_seq_length()
        positions = torch.arange(start, start + count)[None]
        rope = self.rotary(hidden, positions)
        blocked = torch.full((count, past + count), float("-inf"), dtype=hidden.dtype)
        mask = torch.triu(blocked, diagonal=past + 1)[None, None]
        x = hidden
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = layer.hidden_norm(x)
                embedded = layer.input_layernorm(self.embed_tokens(token_ids))
                attention_input = torch.cat((embedded, normed), dim=-1)
                residual = normed if self.geometry.norm_before_residual else x
            else:
                attention_input, residual = layer.input_layernorm(x), x
            attended, _ = layer.self_attn(
                hidden_states=attention_input,
                position_embeddings=rope,
                attention_mask=mask,
                past_key_values=self.cache,
            )
            x = residual + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return self.lm_head(normed), normed if self.geometry.norm_output else x

    def target_id(self, draft_id: int) -> int:
        """Draft-vocabulary id -> target-vocabulary id."""
        return draft_id if self.d2t is None else draft_id + int(self.d2t[draft_id])

    def crop(self, length: int) -> None:
        """Forget every row after the first `length`."""
        self.cache.crop(length - self.cache.get_seq_length())


def random_weights(geometry: Eagle3LlamaGeometry, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the family's table, at magnitudes at which attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, spec in Eagle3Llama().tensor_specs(geometry).items():
        shape = tuple(dim.size for dim in spec.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in {"d2t", "t2d"}:
            continue
        if spec.role == "norm":
            weights[name] = 1 + 0.3 * noise
        else:
            weights[name] = noise * (1.5 / shape[-1] ** 0.5 if spec.role != "embedding" else 1)
    if geometry.draft_vocab_size != geometry.vocab_size:
        kept = torch.randperm(geometry.vocab_size, generator=generator)
        kept = kept[: geometry.draft_vocab_size].sort().values
        weights["d2t"] = kept - torch.arange(len(kept))
    return weights


def _llama_config(g: Eagle3LlamaGeometry) -> LlamaConfig:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": g.rope.theta}
    longest = 4096
    if g.rope.yarn is not None:
        yarn = g.rope.yarn
        longest = int(yarn.factor * yarn.original_max_positions)
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        }
        optional = ("mscale", "mscale_all_dim", "attention_factor")
        rope |= {k: getattr(yarn, k) for k in optional if getattr(yarn, k) is not None}
    return LlamaConfig(
        hidden_size=g.hidden_size,
        intermediate_size=g.intermediate_size,
        num_hidden_layers=g.num_layers,
        num_attention_heads=g.num_attention_heads,
        num_key_value_heads=g.num_key_value_heads,
        head_dim=g.head_dim,
        vocab_size=g.vocab_size,
        rms_norm_eps=g.rms_norm_eps,
        max_position_embeddings=longest,
        rope_parameters=rope,
        attn_implementation="eager",
    )


def _layer(config: LlamaConfig, index: int) -> nn.Module:
    layer = nn.Module()
    layer.self_attn = LlamaAttention(config, index)
    layer.mlp = LlamaMLP(config)
    layer.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    layer.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    if index == 0:
        layer.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=False))
    return layer


def _round_inputs(draft: ReferenceDraft, rounding: Callable[[str, Tensor], Tensor]) -> None:
    for name, module in draft.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            module.register_forward_pre_hook(
                lambda _module, args, name=name: (rounding(name, args[0]), *args[1:])
            )
