"""A DFlash draft assembled from transformers' own modules: the oracle of our forward maths.

It shares no line with `quantize/drafts`: projections, q and k norms, rope, attention, MLP and the
KV cache are those of `transformers.models.qwen3`, attention with sinks that of
`transformers.models.gpt_oss`, the masks those of `transformers.masking_utils`.
It is fed like an engine feeds it: `extend` with the features of verified positions, then `propose`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import reference_draft
import torch
from draftquant.calibration.recording.target_model import cache_argument
from draftquant.quantize.drafts import Family
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.drafts.families.dflash2 import DFlash2Geometry
from draftquant.quantize.drafts.families.dspark import DSparkGeometry
from draftquant.quantize.drafts.families.laguna_dflash import LagunaGeometry
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from reference_draft import ReferenceMlaDraft, common_config
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, Qwen3Config
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

_DFLASH = DFlash()
_WITH_SINKS = "eager_with_sinks"
AttentionInterface.register(_WITH_SINKS, modeling_gpt_oss.eager_attention_forward)
RoundInput = Callable[[str, Tensor], Tensor]


class ReferenceDFlash(nn.Module):
    """One draft whose KV cache holds the context; arguments are those of `ReferenceDraft`."""

    def __init__(
        self,
        geometry: DFlashGeometry,
        weights: Mapping[str, Tensor],
        round_input: RoundInput | None = None,
    ) -> None:
        super().__init__()
        self.geometry = g = geometry
        config = self.make_config(g)
        self.embed_tokens = nn.Embedding(g.vocab_size, g.hidden_size)
        self.fc = nn.Linear(g.num_aux_layers * g.target_hidden_size, g.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.layers = nn.ModuleList(_layer(config) for _ in range(g.num_layers))
        for i, layer in enumerate(self.layers):
            layer.self_attn = self.make_attention(config, i)
        self.norm = Qwen3RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, g.draft_vocab_size, bias=False)
        self.rotary = self.make_rotary(config)
        self.d2t = weights.get("d2t")
        aside = {"d2t", "t2d", "mask_embedding"}
        renamed = {k.replace("attention_sink_bias", "sinks"): v for k, v in weights.items()}
        wanted = {k: v for k, v in renamed.items() if k not in aside}
        self.to(next(iter(wanted.values())).dtype)
        self.load_state_dict(wanted)
        self.requires_grad_(False)
        if "mask_embedding" in weights:  # as SGLang does it: the row of the table is replaced
            self.embed_tokens.weight.data[g.mask_token_id] = weights["mask_embedding"]
        if round_input is not None:
            round_inputs(self, round_input)
        self.cache = DynamicCache()

    def make_config(self, g: Any) -> Any:
        """The config that transformers' modules are built from."""
        own = {"num_key_value_heads": g.attention.num_key_value_heads, "attention_bias": False}
        return Qwen3Config(**common_config(g), **own, head_dim=g.attention.head_dim)

    def make_attention(self, config: Any, index: int) -> nn.Module:
        """One layer's own."""
        attention, given = Qwen3Attention(config, index), self.geometry.attention
        attention.v_proj.register_forward_hook(lambda _m, _args, out: out * given.value_scale)
        if given.sinks:
            config._attn_implementation = _WITH_SINKS
            attention.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        return attention

    def make_rotary(self, config: Any) -> nn.Module:
        """Positions -> cos and sin."""
        return Qwen3RotaryEmbedding(config)

    def extend(self, features: Tensor) -> None:
        """Append the context rows of features [1, T, num_aux * W_target]."""
        rows = self.hidden_norm(self.fc(features))
        start = self.cache.get_seq_length()
        cos, sin = self.rotary(rows, torch.arange(start, start + rows.shape[1])[None])
        for i, layer in enumerate(self.layers):
            entries = self.entries(layer.self_attn, self.of_layer(layer, rows), cos, sin)
            self.cache.update(*entries, i)

    def of_layer(self, _layer: Any, rows: Tensor) -> Tensor:
        """The context's rows as a layer projects them."""
        return rows

    def entries(self, attention: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """What a layer caches of rows [1, T, W]."""
        heads = (1, rows.shape[1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(rows).view(heads)).transpose(1, 2)
        values = attention.v_proj(rows).view(heads).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1], values

    def drafted(
        self, committed: Sequence[int], features: Tensor, known: int, num_draft_tokens: int
    ) -> list[int]:
        """A round's tokens; `known` rows of the cache are of earlier rounds."""
        self.extend(features[None, known:])
        return self.draft(committed[-1], num_draft_tokens)

    def propose(self, anchor: int, num_draft_tokens: int) -> Tensor:
        """Logits [K, draft vocabulary] of the slots behind an anchor that follows the context."""
        logits: Tensor = self.lm_head(self.slots(anchor, num_draft_tokens)[1:])
        return logits

    def slots(self, anchor: int, num_masks: int) -> Tensor:
        """Normed states [1 + num_masks, W] of an anchor that follows the context, and of masks."""
        ids = [anchor] + [self.geometry.mask_token_id] * num_masks
        start = self.cache.get_seq_length()
        slots = torch.arange(start, start + len(ids))
        x = self.embed_tokens(torch.tensor([ids]))
        rope = self.rotary(x, slots[None])
        for i, layer in enumerate(self.layers):
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(x),
                position_embeddings=rope,
                attention_mask=self._mask(i, slots, x.dtype),
                **{cache_argument(layer.self_attn): self.cache},
            )
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.cache.crop(-len(ids))
        hidden: Tensor = self.norm(x)[0]
        return hidden

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """The proposed tokens, target vocabulary."""
        ids = self.propose(anchor, num_draft_tokens).argmax(-1)
        return (ids if self.d2t is None else ids + self.d2t[ids]).tolist()

    def _mask(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[1, 1, S, C + S], zero where a slot looks."""
        g = self.geometry
        sliding = (g.layer_types or ["full_attention"] * g.num_layers)[layer] != "full_attention"
        causal = sliding if g.causal is None else g.causal
        if sliding:
            look = (
                sliding_window_causal_mask_function(g.sliding_window)
                if causal  # the window of engines counts the own position, this one does not:
                else sliding_window_bidirectional_mask_function(g.sliding_window - 1)
            )
        else:
            look = causal_mask_function if causal else bidirectional_mask_function
        keys = torch.arange(int(slots[-1]) + 1)
        seen = look(0, 0, slots[:, None], keys[None]).expand(len(slots), len(keys))
        blocked = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
        return blocked[None, None]


def random_weights(
    geometry: DFlashGeometry, seed: int = 0, family: Family = _DFLASH
) -> dict[str, Tensor]:
    """See `reference_draft.random_weights`."""
    return reference_draft.random_weights(geometry, seed, family)


def _layer(config: Qwen3Config) -> nn.Module:
    layer = nn.Module()
    layer.mlp = Qwen3MLP(config)
    layer.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    layer.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    return layer


def round_inputs(draft: nn.Module, rounding: RoundInput) -> None:
    """Let `rounding` see, and replace, the input of every attention and MLP linear."""
    for name, module in draft.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            module.register_forward_pre_hook(
                lambda _module, args, name=name: (rounding(name, args[0]), *args[1:])
            )


# ---- DSpark, which chooses its tokens one after the other: heads are torch's own modules

Choose = Callable[[Tensor], int]


class ReferenceDSpark:
    """One draft whose KV cache holds the context; see `ReferenceDFlash`."""

    make_body: type[ReferenceDFlash] = ReferenceDFlash
    drafted = ReferenceDFlash.drafted  # type: ignore[assignment]

    def __init__(
        self,
        geometry: DSparkGeometry,
        weights: Mapping[str, Tensor],
        round_input: RoundInput | None = None,
    ) -> None:
        heads = ("markov_head.", "confidence_head.")
        body = {name: tensor for name, tensor in weights.items() if not name.startswith(heads)}
        self.body = self.make_body(geometry, body, round_input)
        self.geometry, self.d2t = geometry, weights.get("d2t")
        self.extend = self.body.extend
        g = geometry
        self.w1 = nn.Embedding(g.vocab_size, g.markov_rank)
        self.w2 = nn.Linear(g.markov_rank, g.draft_vocab_size, bias=False)
        for module, name in ((self.w1, "markov_w1"), (self.w2, "markov_w2")):
            own = weights[f"markov_head.{name}.weight"]
            module.to(own.dtype).load_state_dict({"weight": own})

    @torch.no_grad()
    def steps(self, anchor: int, num_draft_tokens: int, choose: Choose) -> list[Tensor]:
        """Logits [draft vocabulary] of each step; `choose` makes of them the token that follows."""
        first = 0 if self.geometry.proposes_from_anchor else 1
        hidden = self.body.slots(anchor, num_draft_tokens - 1 + first)[first:]
        token, found = anchor, []
        for h in hidden:
            found.append(self.body.lm_head(h) + self.w2(self.w1.weight[token]))
            token = choose(found[-1])
        return found

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """The proposed tokens, target vocabulary."""
        chosen: list[int] = []

        def greedy(logits: Tensor) -> int:
            best = int(logits.argmax())
            chosen.append(best if self.d2t is None else best + int(self.d2t[best]))
            return chosen[-1]

        self.steps(anchor, num_draft_tokens, greedy)
        return chosen


class _LatentBody(ReferenceDFlash):
    """Layers with DeepSeek-V3's attention of transformers, whose cache holds latents."""

    make_config = ReferenceMlaDraft.make_config  # type: ignore[assignment]
    make_rotary = ReferenceMlaDraft.make_rotary  # type: ignore[assignment]

    def make_attention(self, config: Any, index: int) -> nn.Module:
        attention = DeepseekV3Attention(config, index)
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps
        return attention

    def entries(self, attention: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        sizes = [attention.kv_lora_rank, attention.qk_rope_head_dim]
        latent, k = attention.kv_a_proj_with_mqa(rows)[:, None].split(sizes, dim=-1)
        return attention.kv_a_layernorm(latent), apply_rotary_pos_emb_interleave(k, k, cos, sin)[1]


class ReferenceDSparkMla(ReferenceDSpark):
    """See `ReferenceDSpark`."""

    make_body = _LatentBody


# ---- Laguna's, whose gates and norms of features are spelled out


class ReferenceLaguna(ReferenceDFlash):
    """Qwen3's modules hold the three parts of each qkv_proj; o_proj reads gated heads."""

    def __init__(self, geometry: LagunaGeometry, weights: Mapping[str, Tensor],
                 round_input: RoundInput | None = None) -> None:  # fmt: skip
        plain = {
            n: w for n, w in weights.items() if "aux_hidden_norms" not in n and "g_proj" not in n
        }
        for name in [n for n in plain if "qkv_proj" in n]:
            heads = plain.pop(name).unflatten(0, (-1, geometry.attention.head_dim))
            keys, queries = geometry.attention.num_key_value_heads, geometry.num_attention_heads
            ends = {"q": heads[:queries], "k": heads[queries:-keys], "v": heads[-keys:]}
            plain |= {name.replace("qkv", part): w.flatten(0, 1) for part, w in ends.items()}
        super().__init__(geometry, plain)
        self.scales = [
            weights[f"aux_hidden_norms.{i}.weight"] for i in range(geometry.num_aux_layers)
        ]
        for i, layer in enumerate(self.layers):
            gates = weights.get(f"layers.{i}.self_attn.g_proj.weight")
            if gates is not None:
                self._gate(layer.self_attn, gates)
        if round_input is not None:  # of o_proj what the gates have left
            round_inputs(self, round_input)

    def _gate(self, attention: nn.Module, gates: Tensor) -> None:
        inputs: list[Tensor] = []
        attention.register_forward_pre_hook(
            lambda _module, _args, named: inputs.append(named["hidden_states"]), with_kwargs=True
        )

        def gated(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
            factor = (1 + (inputs.pop() @ gates.T).exp()).log()
            return args[0] * factor.repeat_interleave(args[0].shape[-1] // len(gates), dim=-1)

        attention.o_proj.register_forward_pre_hook(gated)

    def extend(self, features: Tensor) -> None:
        """See `ReferenceDFlash.extend`."""
        mean = [
            x / (x.square().mean(-1, keepdim=True) + self.geometry.rms_norm_eps).sqrt()
            for x in features.split(self.geometry.target_hidden_size, dim=-1)
        ]
        super().extend(torch.cat([x * w for x, w in zip(mean, self.scales, strict=True)], dim=-1))

    def of_layer(self, layer: Any, rows: Tensor) -> Tensor:
        """Normed, as the rows of a block are."""
        normed: Tensor = layer.input_layernorm(rows)
        return normed


# ---- DFlash2, one token after the other

# Convolutions and the walk over the candidates are spelled out in loops; nothing of
# `quantize/drafts` is used but the geometry. Unlike replay, which reads the recorded tokens, this
# reads the tokens that it chose.


_OWN = ("candidate_selector.", "attention_conv.", "mlp_conv.")


class ReferenceDFlash2(ReferenceDFlash):
    """A block is one pass, then a walk among the candidates of its slots."""

    def __init__(self, geometry: DFlash2Geometry, weights: Mapping[str, Tensor],
                 round_input: Any = None) -> None:  # fmt: skip
        plain = {n: w for n, w in weights.items() if not any(mark in n for mark in _OWN)}
        super().__init__(geometry, plain, round_input)
        self.own = {n: w.double() for n, w in weights.items() if n not in plain}
        self.norm.register_forward_hook(lambda _module, _args, out: self._remember(out))
        for i, layer in enumerate(self.layers):
            self._wrap(layer.self_attn, f"layers.{i}.attention_conv.")
            self._wrap(layer.mlp, f"layers.{i}.mlp_conv.")

    def _remember(self, out: Tensor) -> None:
        """The normed hidden states of the last block."""
        self.hidden = out[0]

    def _wrap(self, module: nn.Module, prefix: str) -> None:
        kernels: list[Tensor] = []

        def before(_module: nn.Module, args: Any, named: Any) -> Any:
            x = named["hidden_states"] if named else args[0]
            g: Any = self.geometry
            added = x @ self.own[prefix + "kernel_projection.weight"].T
            shape = (*x.shape[:2], 2, g.conv_kernel_size, g.hidden_size // g.conv_group_size)
            kernels[:] = added.view(shape).unbind(2)
            x = self._convolved(x, prefix, 0, kernels[0])
            return (args, {**named, "hidden_states": x}) if named else ((x,), named)

        def after(_module: nn.Module, _args: Any, _named: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (self._convolved(out[0], prefix, 1, kernels[1]), *out[1:])
            return self._convolved(out, prefix, 1, kernels[1])

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _convolved(self, x: Tensor, prefix: str, side: int, added: Tensor) -> Tensor:
        base, out = self.own[prefix + "base_kernel"][side], torch.zeros_like(x)
        size = self.geometry.conv_group_size  # type: ignore[attr-defined]
        for slot in range(x.shape[1]):
            for tap in range(min(len(base), slot + 1)):
                coefficients = base[tap] + added[0, slot, tap].repeat_interleave(size)
                out[0, slot] += coefficients * x[0, slot - tap]
        return out

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """See `ReferenceDFlash.draft`."""
        g: Any = self.geometry
        logits, chosen = self.propose(anchor, num_draft_tokens), [anchor]
        codes = {name: self.own[f"candidate_selector.{name}_codebook"]
                 for name in ("predecessor", "successor")}  # fmt: skip
        projection = self.own["candidate_selector.hidden_projection.weight"]
        for slot in range(num_draft_tokens):
            candidates = logits[slot].argsort(descending=True)[: g.selector_top_k].tolist()
            before = codes["predecessor"][chosen[-1]] * (projection @ self.hidden[slot + 1])
            scores = {c: logits[slot, c] + before @ codes["successor"][c] for c in candidates}
            chosen.append(max(scores, key=lambda token: float(scores[token])))
        return chosen[1:]
