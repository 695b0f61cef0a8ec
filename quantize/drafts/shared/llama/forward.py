"""Forward maths of drafts of ordinary Llama layers: EAGLE-1 heads and small language models.

Sources: `eagle/model/cnets1.py` of SafeAILab/EAGLE @cb7e084; `llama_eagle.py`, `llama.py`,
`qwen2.py` and `qwen3.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from ...forward import Attend, OnInput
from ...kinds.chain import ChainForward
from ...kinds.text import TextForward
from ...maths import embedding, linear, rms_norm
from ..eagle3.forward import LlamaAttention
from .geometry import LlamaGeometry


class LlamaForward(ChainForward):
    """Layers over weights given by canonical name; x + o(attention(norm x)), then the MLP alike."""

    def __init__(
        self, geometry: LlamaGeometry, weights: Mapping[str, Tensor], on_input: OnInput
    ) -> None:
        self.geometry = geometry
        self.weights = weights
        self.on_input = on_input
        self.attention = LlamaAttention(
            head_dim=geometry.head_dim, rope=geometry.rope, qk_norm=geometry.qk_norm
        )

    @property
    def num_logits(self) -> int:
        """See `DraftForward.num_logits`."""
        return self.geometry.vocab_size

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftForward.fuse`: the features as they are."""
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.logits`; a tied head is the embedding."""
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        return linear(self.head_input(hidden), head)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `DraftForward.to_target`: the vocabulary is the target's."""
        return draft_ids

    def linear(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.linear`; with its bias, where the linear has one."""
        product = self.kept_linear(name, self.on_input(name, x)).to(x.dtype)
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.kept_linear`."""
        return linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.norm`."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.geometry.rms_norm_eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding [B, T, W], in the dtype of the norms."""
        dtype = self.weights["layers.0.post_attention_layernorm.weight"].dtype
        return embedding(token_ids, self.weights["embed_tokens.weight"], dtype)

    def layers(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, T, W] behind all layers."""
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            inner = f"{prefix}input_layernorm"
            y = self.norm(inner, x) if f"{inner}.weight" in self.weights else x
            q, k, v, scale = self.attention.project(f"{prefix}self_attn.", y, positions, self)
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = x + self.linear(f"{prefix}self_attn.o_proj", mixed)
            z = self.norm(f"{prefix}post_attention_layernorm", r)
            gate, up = (self.linear(f"{prefix}mlp.{half}_proj", z) for half in ("gate", "up"))
            x = r + self.linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)
        return x


class Eagle1Forward(LlamaForward):
    """Row t pairs the target's last hidden state of position t with token t + 1, at position t.

    No norm stands before layer 0 or before the head: what the layers give out is both the next
    step's hidden state and what the head reads.
    """

    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `ChainForward.step`: layers(fc([embedding; hidden]))."""
        x = self.linear("fc", torch.cat((self.embed(token_ids), hidden), dim=-1))
        return self.layers(x, positions, attend)

    def head_input(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.head_input`."""
        return self.on_input("lm_head", hidden)


class LanguageModelForward(LlamaForward, TextForward):
    """A language model, which continues the text that it reads itself."""

    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `ChainForward.step`; the hidden state of the step before is not read."""
        del hidden
        return self.layers(self.embed(token_ids), positions, attend)

    def head_input(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.head_input`."""
        return self.on_input("lm_head", self.norm("norm", hidden))
