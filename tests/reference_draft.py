"""An EAGLE-3 Llama draft assembled from transformers' own modules: the oracle of our forward maths.

It shares no line with `quantize/drafts`: attention, norms, MLP, rope and the KV cache are those of
`transformers.models.llama`; only the q/k/v inputs of layer 0 are widened.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from draftquant.calibration.recording.target_model import cache_argument
from draftquant.quantize.drafts import Family
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from draftquant.quantize.drafts.passes import ChainForward
from draftquant.quantize.drafts.rope import RopeConfig
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
    modeling_rope_utils,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3 import modeling_qwen3


@contextmanager
def transformers_in_float64() -> Iterator[None]:
    """Make transformers compute norms, angles and softmax in float64 where it asks for float32.

    Without this, a float64 model still rounds to float32 in the middle, and two correct
    implementations agree to 1e-7 only: too coarse to tell a small error from rounding.
    """
    wide = types.SimpleNamespace(**vars(torch))
    wide.float32 = wide.float = torch.float64
    with (
        mock.patch.object(modeling_llama, "torch", wide),
        mock.patch.object(modeling_deepseek_v3, "torch", wide),
        mock.patch.object(modeling_qwen3, "torch", wide),
        mock.patch.object(modeling_rope_utils, "torch", wide),
    ):
        yield


class ReferenceDraft(nn.Module):
    """One draft with a KV cache, fed like an engine feeds it: `extend`, then `crop`.

    `weights` by canonical name, of the dtype of the computation; `round_input`: (canonical module
    name, input) -> rounded input.
    """

    kept: tuple[str, ...] = ()
    """Linears of a layer that are never quantized, so nothing rounds their inputs."""

    def __init__(
        self,
        geometry: Any,
        weights: Mapping[str, Tensor],
        round_input: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.geometry = g = geometry
        config = self.make_config(g)
        width, aux_width = g.hidden_size, g.num_aux_layers * g.target_hidden_size
        self.embed_tokens = nn.Embedding(g.vocab_size, width)
        self.fc = nn.Linear(aux_width, width, bias=False)
        if g.norm_before_fc:
            self.input_norm = LlamaRMSNorm(aux_width, g.rms_norm_eps)
        if g.fc_norm:
            norms = [LlamaRMSNorm(g.target_hidden_size, g.rms_norm_eps) for _ in range(3)]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(self.make_layer(config, i) for i in range(g.num_layers))
        self.norm = LlamaRMSNorm(width, g.rms_norm_eps)
        self.lm_head = nn.Linear(width, g.draft_vocab_size, bias=False)
        self.rotary = self.make_rotary(config)
        self.d2t = weights.get("d2t")
        wanted = {k: v for k, v in weights.items() if k not in {"d2t", "t2d"}}
        self.to(next(iter(wanted.values())).dtype)
        self.load_state_dict(wanted)
        self.requires_grad_(False)
        if round_input is not None:
            _round_inputs(self, round_input)
        self.cache = DynamicCache()

    def make_config(self, g: Eagle3Geometry) -> PreTrainedConfig:
        """The config that transformers' modules are built from."""
        own = {"num_key_value_heads": g.attention.num_key_value_heads}
        return LlamaConfig(**common_config(g), **own, head_dim=g.attention.head_dim)

    def make_rotary(self, config: Any) -> nn.Module:
        """Positions -> cos and sin."""
        return LlamaRotaryEmbedding(config)

    def make_layer(self, config: Any, index: int) -> nn.Module:
        """Attention, MLP and norms of one layer; layer 0 reads [embedding; hidden]."""
        layer = nn.Module()
        layer.self_attn = LlamaAttention(config, index)
        layer.mlp = LlamaMLP(config)
        add_norms(layer, config, index)
        if index == 0:
            widen(layer.self_attn, "q_proj", "k_proj", "v_proj")
        return layer

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

    def extend(self, token_ids: Tensor, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Append rows [B, T] at positions start, ... -> (target-vocabulary logits, hidden)."""
        count, past = token_ids.shape[1], self.cache.get_seq_length()
        rope = self.rotary(hidden, torch.arange(start, start + count)[None])
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
            given = {"position_embeddings": rope, "attention_mask": mask}
            given[cache_argument(layer.self_attn)] = self.cache
            attended, _ = layer.self_attn(hidden_states=attention_input, **given)
            x = residual + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return self.lm_head(normed), normed if self.geometry.norm_output else x

    def target_id(self, draft_id: int) -> int:
        """Draft-vocabulary id -> target-vocabulary id."""
        return draft_id if self.d2t is None else draft_id + int(self.d2t[draft_id])

    def drafted(
        self, committed: Sequence[int], features: Tensor, known: int, num_draft_tokens: int
    ) -> list[int]:
        """A round's tokens; `known` rows of the cache are from true features of earlier rounds."""
        self.crop(known)  # the rows after it were computed from the draft's own hidden states
        fused = self.fuse(features[None, known:])
        logits, hidden = self.extend(torch.tensor([committed[known + 1 :]]), fused, known)
        drafted = [self.target_id(int(logits[0, -1].argmax()))]
        while len(drafted) < num_draft_tokens:
            position = len(committed) - 2 + len(drafted)
            logits, hidden = self.extend(torch.tensor([[drafted[-1]]]), hidden[:, -1:], position)
            drafted.append(self.target_id(int(logits[0, -1].argmax())))
        return drafted

    def crop(self, length: int) -> None:
        """Forget every row after the first `length`."""
        if length < self.cache.get_seq_length():  # in transformers 5.0, 0 removes all
            self.cache.crop(length - self.cache.get_seq_length())


def random_weights(geometry: Any, seed: int = 0, family: Family | None = None) -> dict[str, Tensor]:
    """Every tensor of the family's table, at magnitudes at which attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, spec in (family or Eagle3Llama()).tensor_specs(geometry).items():
        shape = tuple(dim.size for dim in spec.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if spec.role == "vocabulary_map":
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


def common_config(g: Eagle3Geometry) -> dict[str, Any]:
    """Keys that every config class of transformers has."""
    yarn = g.rope.yarn
    return {
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.num_attention_heads,
        "vocab_size": g.vocab_size,
        "rms_norm_eps": g.rms_norm_eps,
        "max_position_embeddings": int(yarn.factor * yarn.original_max_positions) if yarn else 4096,
        "rope_parameters": _rope_parameters(g.rope),
        "attn_implementation": "eager",
    }


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    yarn = rope.yarn
    optional = ("mscale", "mscale_all_dim", "attention_factor")
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    } | {k: getattr(yarn, k) for k in optional if getattr(yarn, k) is not None}


def add_norms(layer: nn.Module, config: Any, index: int) -> None:
    """The norms of an EAGLE-3 layer."""
    names = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    for name in names[: 3 if index == 0 else 2]:
        setattr(layer, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))


def widen(attention: nn.Module, *names: str) -> None:
    """Make these linears read a row twice as wide."""
    for name in names:
        narrow = getattr(attention, name)
        setattr(attention, name, nn.Linear(2 * narrow.in_features, narrow.out_features, bias=False))


def _round_inputs(draft: ReferenceDraft, rounding: Callable[[str, Tensor], Tensor]) -> None:
    for name, module in draft.named_modules():
        linear = isinstance(module, nn.Linear) and name.startswith("layers.")
        if linear and not name.endswith(draft.kept):
            module.register_forward_pre_hook(
                lambda _module, args, name=name: (rounding(name, args[0]), *args[1:])
            )


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """softmax(q k^T * scale) v, key-value heads repeated to the number of query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.mT) * scale
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


class CachedAttention:
    """Attention over all keys seen so far, per layer: the caller's side of `ChainForward.step`."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer in self.keys:
            k, v = (torch.cat(pair, 2) for pair in zip(self.keys[layer], (k, v), strict=True))
        self.keys[layer] = (k, v)
        new, total = q.shape[2], k.shape[2]
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        return softmax_attention(q, k, v, scale, visible)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def check_extend_and_chain(geometry: Eagle3Geometry, forward: ChainForward, reference: Any) -> None:
    """A forward's first step over a text and its chain equal those of a reference."""
    generator = torch.Generator().manual_seed(1)
    count, num_draft_tokens = 37, 4
    tokens = torch.randint(geometry.vocab_size, (2, count), generator=generator)
    width = geometry.num_aux_layers * geometry.target_hidden_size
    features = torch.randn((2, count, width), generator=generator, dtype=torch.float64)
    assert_close(forward.fuse(features), reference.fuse(features))

    attend = CachedAttention()
    our_hidden = forward.step(tokens, forward.fuse(features), torch.arange(count), attend)
    ours = forward.logits(our_hidden)
    theirs, their_hidden = reference.extend(tokens, reference.fuse(features), 0)
    assert ours.shape == (2, count, geometry.draft_vocab_size)
    for depth in range(1, num_draft_tokens):
        assert_close(ours, theirs)
        assert_close(our_hidden, their_hidden)
        position = count - 1 + depth
        next_tokens = forward.to_target(ours[:, -1:].argmax(-1))
        our_hidden = forward.step(next_tokens, our_hidden[:, -1:], torch.tensor([position]), attend)
        ours = forward.logits(our_hidden)
        theirs, their_hidden = reference.extend(next_tokens, their_hidden[:, -1:], position)
    assert_close(ours, theirs)


# ---- latent attention

# Modules of `transformers.models.deepseek_v3`, whose KV cache holds the latents, not the keys and
# values that our maths keeps. The norms of the latents get the draft's epsilon, which vLLM 0.33 and
# SGLang 0.5.23 hand to them (`deepseek_v2.py` of both); transformers leaves them at 1e-6.


class ReferenceMlaDraft(ReferenceDraft):
    """See `ReferenceDraft`."""

    kept = ("kv_b_proj",)

    def make_config(self, g: Eagle3Geometry) -> DeepseekV3Config:  # type: ignore[override]
        return DeepseekV3Config(
            **common_config(g),
            num_key_value_heads=g.num_attention_heads,
            q_lora_rank=g.attention.q_lora_rank,
            kv_lora_rank=g.attention.kv_lora_rank,
            qk_nope_head_dim=g.attention.qk_nope_head_dim,
            qk_rope_head_dim=g.attention.qk_rope_head_dim,
            v_head_dim=g.attention.v_head_dim,
            rope_interleave=g.attention.rope_interleave,
        )

    def make_rotary(self, config: Any) -> nn.Module:
        return DeepseekV3RotaryEmbedding(config)

    def make_layer(self, config: Any, index: int) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = DeepseekV3Attention(config, index)
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps
        layer.mlp = DeepseekV3MLP(config)
        add_norms(layer, config, index)
        if index == 0:
            widen(layer.self_attn, "q_a_proj", "kv_a_proj_with_mqa")
        return layer
