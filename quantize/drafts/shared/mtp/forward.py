"""Forward maths of a multi-token prediction layer, as engines serve it.

Row t pairs the target's last hidden state at position t with token t + 1 and has position id t, as
in EAGLE-3. Sources: `models/mimo_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_next_mtp.py`
of vLLM 0.33.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ...forward import Attend, Modules, ModulesForward, OnInput, ProductLogits, gated_mlp
from ...maths import Product, embedding, linear, rms_norm
from ...passes import ChainForward, StagedForward
from ..attention.forward import Attention
from ..mixture.forward import mixture_mlp
from .geometry import MtpGeometry, MtpGroupedGeometry, MtpStepGeometry, around_layer


class MtpForward(ModulesForward, ChainForward, ProductLogits):
    """One MTP module over weights given by canonical name; see `Mtp` for the four choices."""

    geometry: MtpGeometry

    def __init__(
        self,
        geometry: MtpGeometry,
        weights: Mapping[str, Tensor],
        on_input: OnInput,
        attention: Attention,
        *,
        number: int,
        state_first: bool,
        masks_first: bool,
        feeds_back_normed: bool,
        zero_centred: bool,
    ) -> None:
        super().__init__(geometry, weights, on_input)
        self.attention = attention
        self.number = number
        self.state_first = state_first
        self.masks_first = masks_first
        self.feeds_back_normed = feeds_back_normed
        self.zero_centred = zero_centred

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        r = self.linear(self._around("fc"), self._both(token_ids, hidden, positions))
        prefix = f"layers.{self.number}."
        a = self.norm(prefix + "input_layernorm", r)
        modules = self._of_attention()
        q, k, v, scale = self.attention.project(prefix + "self_attn.", a, positions, modules)
        mixed = attend(0, q, k, v, scale).transpose(1, 2).flatten(2)
        r = r + modules.linear(prefix + "self_attn.o_proj", mixed)
        x = r + self._mlp(prefix + "mlp.", self.norm(prefix + "post_attention_layernorm", r))
        return self.norm(self._around("norm"), x) if self.feeds_back_normed else x

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        head = self._table("lm_head")
        bias = self.weights.get(f"{head}.bias")
        return [(self.head_input(hidden), self.weights[f"{head}.weight"], bias)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.feeds_back_normed else self.norm(self._around("norm"), hidden)
        return self.on_input(self._table("lm_head"), normed)

    @override
    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.kept_linear(name, self.on_input(name, x)).to(x.dtype)

    @override
    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        product = linear(x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias.to(product.dtype)

    @override
    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self.weights[f"{name}.weight"], self.geometry.rms_norm_eps
        if not self.zero_centred:
            return rms_norm(x, weight, eps)
        wide = torch.promote_types(x.dtype, torch.float32)  # rounded once: 1 + weight needs bits
        return rms_norm(x.to(wide), 1 + weight.to(wide), eps).to(x.dtype)

    def _around(self, name: str) -> str:
        return around_layer(self.number, name)

    def _table(self, name: str) -> str:
        """The module's own table; where it has none, that of the first or of the target."""
        own = self._around(name)
        return own if f"{own}.weight" in self.weights else name

    def _of_attention(self) -> Modules:
        g = self.geometry
        if isinstance(g, MtpGroupedGeometry) and g.output_gate:
            return Gated(self, g.head_dim)
        if isinstance(g, MtpStepGeometry):
            return GatedByHead(self, g.head_dim)
        return self

    def _both(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The normed embedding and the normed state, in the order of the family."""
        table = self.weights[f"{self._table('embed_tokens')}.weight"]
        embedded = embedding(token_ids, table, hidden.dtype)
        if self.masks_first:
            embedded = embedded * (positions > 0)[:, None]
        e = self.norm(self._around("embedding_norm"), embedded)
        u = self.norm(self._around("state_norm"), hidden)
        return torch.cat((u, e) if self.state_first else (e, u), dim=-1)

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        """One MLP, or a mixture of experts."""
        mixture = self.geometry.mixture
        if mixture is None:
            return gated_mlp(prefix, x, self)
        router = self.weights[f"{prefix}gate.weight"]
        correction = self.weights.get(f"{prefix}gate.e_score_correction_bias")
        return mixture_mlp(mixture, prefix, x, self, router, correction)


class MtpModules(StagedForward):
    """Several modules, of which module i drafts token i + 1."""

    def __init__(self, modules: Sequence[MtpForward]) -> None:
        geometry = modules[0].geometry
        super().__init__(geometry, modules[0].weights, modules[0].on_input)
        self.modules = modules
        self.window = geometry.window_of(0)


class _Behind(Modules):
    """The modules of an attention whose output is gated. One is made for one step."""

    def __init__(self, modules: Modules, head_dim: int) -> None:
        self.modules = modules
        self.head_dim = head_dim
        self._gate: Tensor

    @override
    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        return self.modules.kept_linear(name, x)

    @override
    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.modules.norm(name, x)

    @override
    def cached(self, prefix: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.modules.cached(prefix, keys, values)


class Gated(_Behind):
    """The modules of an attention whose output is gated, element by element: Qwen3-Next.

    A head's rows of q_proj are its query and then its gate g: o_proj reads sigmoid(g) times what
    the head saw.
    """

    @override
    def linear(self, name: str, x: Tensor) -> Tensor:
        # Of q_proj the queries alone, before o_proj the gate.
        if name.endswith(".o_proj"):
            return self.modules.linear(name, x * self._gate.sigmoid())
        product = self.modules.linear(name, x)
        if not name.endswith(".q_proj"):
            return product
        queries, gate = product.view(*x.shape[:-1], -1, 2, self.head_dim).unbind(-2)
        self._gate = gate.flatten(-2)
        return queries.flatten(-2)


class GatedByHead(_Behind):
    """The modules of an attention each of whose heads is weighed by one number: Step-3.5.

    That is the sigmoid of g_proj, which reads what q_proj reads.
    """

    @override
    def linear(self, name: str, x: Tensor) -> Tensor:
        # The gate is computed beside q_proj and goes before o_proj.
        block, _, leaf = name.rpartition(".")
        if leaf == "q_proj":
            gate = self.modules.kept_linear(f"{block}.g_proj", x).to(x.dtype)
            self._gate = gate.sigmoid().repeat_interleave(self.head_dim, dim=-1)
        return self.modules.linear(name, x * self._gate if leaf == "o_proj" else x)
