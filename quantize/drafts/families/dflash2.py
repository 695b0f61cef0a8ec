"""DFlash2: `DFlash2DraftModel`, DFlash with convolutions in its layers and a candidate selector.

Sources: vLLM 0.33 `qwen3_dflash2.py` and `v1/worker/gpu/spec_decode/dflash2/speculator.py`; SGLang
0.5.23 `dflash.py:520-591,1189-1302`. Engines read its own keys only in `dflash_config`;
only vLLM, which we follow, reads `input_embedding_scale`. The speculators package has no DFlash2;
vLLM reads its layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..config_reader import ConfigReader, Served
from ..engine_traits import ExtraLinear, Finding, Speculators, refused_roots
from ..family import Dim, Draft, Lint, SpeculatorsForm, TensorSpec, told
from ..forward import Attend, DraftForward
from ..maths import Tensor, embedding, linear, torch
from ..shared.block_layers import DFlashForward, DFlashGeometry
from . import dflash
from .dflash import DFlash

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_SELECTOR = "candidate_selector."


def _read_in_vllm(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    plain = dflash.read_in_vllm(config, layers)
    if isinstance(plain, Finding):
        return plain
    absent = next((key for key in _KEYS if config.get(key) is None), None)
    if absent is not None:
        return Finding("init", f"KeyError: {absent!r}", f"add {absent!r}, as it was trained")
    return plain | _renamed(plain, {key: config[key] for key in _KEYS})


def _renamed(plain: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a DFlash draft, and DFlash2's own."""
    options = {**plain["dflash_config"], **section}
    return {"architectures": ["DFlash2DraftModel"], "dflash_config": options}


_DFLASH = dflash.ENGINE_TRAITS
ENGINE_TRAITS = replace(
    _DFLASH,
    prunes_vocabulary=False,
    convolutions=_CONVOLUTIONS,
    # vLLM 0.33 `qwen3_dflash2.py:316`, SGLang `dflash.py`.
    extra_linears=(ExtraLinear("candidate_selector.hidden_projection"),),
    module_names=("candidate_selector",),
    vllm=replace(
        _DFLASH.vllm,
        architectures=frozenset({"DFlash2DraftModel"}),
        roots=refused_roots("DFlash2Qwen3Model", "draft_model", "dflash_module"),
        speculators={"dflash2": Speculators(_read_in_vllm, qwen3=True)},
    ),
    sglang=replace(_DFLASH.sglang, architectures=frozenset({"DFlash2DraftModel"})),
    tensorrt_llm=replace(_DFLASH.tensorrt_llm, architectures=frozenset()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Geometry(DFlashGeometry):
    """Config of a DFlash2 draft.

    Attributes:
        conv_kernel_size: taps of the convolutions: a slot and those before it.
        conv_group_size: channels that share what the input adds to a kernel.
        selector_rank: width of the codebooks.
        selector_top_k: the head's most likely tokens, among which each slot chooses.
        final_logit_softcapping: c of c tanh(logits / c), after the multiplier; None = none.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @property
    def num_groups(self) -> int:
        """Groups of channels in a convolution."""
        return self.hidden_size // self.conv_group_size


class DFlash2Forward(DFlashForward):
    """One DFlash2 draft.

    Among the head's most likely tokens each slot takes the one with the highest score: its logit
    and how well it follows the previous token. After correct tokens this walk stands on the
    recorded tokens, and after the first wrong one nothing counts: so slots read the recorded
    tokens here.
    """

    geometry: DFlash2Geometry

    @override
    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        # Hidden states of the slots and the codebook's rows of the tokens before them,
        # [A, K, W + selector_rank].
        hidden = super().proposing(x, token_ids)
        codes = self.weights[_SELECTOR + "predecessor_codebook"]
        return torch.cat((hidden, embedding(token_ids[:, :-1], codes, x.dtype)), dim=-1)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return super().head_input(hidden[..., : self.geometry.hidden_size])

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        # Scores of the candidates, -infinity for every other token.
        unary = self._unary(hidden)
        offered = unary.topk(self.geometry.selector_top_k, dim=-1).indices
        scores = self._scores(hidden, unary)
        return torch.full_like(scores, -torch.inf).scatter(-1, offered, scores.gather(-1, offered))

    @override
    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        # No part of the vocabulary shows which tokens are candidates.
        return DraftForward.largest_logits(self, hidden, most)

    @override
    def scores(self, hidden: Tensor) -> Tensor:
        # For all tokens, as if each were a candidate.
        return self._scores(hidden, self._unary(hidden))

    def _unary(self, hidden: Tensor) -> Tensor:
        return linear(self.head_input(hidden), self.weights["lm_head.weight"])

    def _scores(self, hidden: Tensor, unary: Tensor) -> Tensor:
        """Score[token] = logit[token] + <before * projection(h), successor[token]>."""
        g = self.geometry
        unary = unary * g.output_multiplier
        if g.final_logit_softcapping is not None:
            unary = g.final_logit_softcapping * (unary / g.final_logit_softcapping).tanh()
        here, before = hidden[..., : g.hidden_size], hidden[..., g.hidden_size :]
        projection = self.weights[_SELECTOR + "hidden_projection.weight"]
        projected = linear(self.norm("norm", here), projection)
        return unary + linear(before * projected, self.weights[_SELECTOR + "successor_codebook"])

    @override
    def _embed(self, token_ids: Tensor) -> Tensor:
        return super()._embed(token_ids) * self.geometry.input_embedding_scale

    @override
    def attended(self, number: int, y: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        attended = super().attended
        prefix = f"layers.{number}.attention_conv."
        return self._convolved(prefix, y, lambda x: attended(number, x, positions, attend))

    @override
    def mlp(self, number: int, z: Tensor) -> Tensor:
        mlp = super().mlp
        return self._convolved(f"layers.{number}.mlp_conv.", z, lambda x: mlp(number, x))

    def _convolved(self, prefix: str, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve the input and the output of a part of a layer; x gives the kernels of both."""
        g = self.geometry
        added = linear(x, self.weights[prefix + "kernel_projection.weight"]).to(x.dtype)
        added = added.view(*x.shape[:-1], 2, g.conv_kernel_size, g.num_groups)
        first, last = added.unbind(-3)
        base = self.weights[prefix + "base_kernel"]
        return grouped_conv(inner(grouped_conv(x, base[0], first)), base[1], last)


def grouped_conv(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """out[s] = sum over taps t of (base[t] + added[s, t]) * x[s - t], nothing before slot 0.

    With x [A, S, W], the slots of A blocks, and a kernel base [taps, W]; added [A, S, taps, G] is
    shared by the W / G channels of each group.
    """
    groups = added.shape[-1]
    kernel = base.reshape(len(base), groups, -1) + added[..., None]
    channels = x.reshape(*x.shape[:-1], groups, -1)
    out: Tensor = kernel[:, :, 0] * channels
    for tap in range(1, len(base)):
        before = torch.nn.functional.pad(channels, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]]
        out = out + kernel[:, :, tap] * before
    return out.flatten(-2)


def float16(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM issue 55250 (0 of 1,100 tokens accepted), dflash-mlx issue 60."""
    config = draft.layer_config
    declared = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    if declared or any(row.tensor.dtype == "F16" for row in draft.rows):
        yield told("dflash2-float16")


def embedding_scale(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM 0.33 `qwen3_dflash2.py:377`; SGLang 0.5.23 asks the target instead."""
    geometry = draft.geometry
    if isinstance(geometry, DFlash2Geometry) and geometry.input_embedding_scale != 1:
        yield told("dflash2-embedding-scale", scale=geometry.input_embedding_scale)


def _spelled(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dflash2`, which passes on only these keys."""
    return _renamed(dflash.dflash_keys(keys, layers), keys.positives(*_KEYS))


class DFlash2(DFlash):
    """The DFlash2 family."""

    name = "dflash2"
    engine_traits = ENGINE_TRAITS
    speculators = {  # noqa: RUF012 - a constant of the class
        "dflash2": SpeculatorsForm(("DFlash2Speculator", "DFlash2DraftModel"), _spelled)
    }
    architectures = ("DFlash2DraftModel",)
    whole_vocabulary = "the candidates of its selector are tokens of the target"
    served: Served = {  # noqa: RUF012 - a constant of the class
        key: value
        for key, value in DFlash.served.items()
        if key not in ("conv_kernel_size", "selector_rank")
    }
    lints = (*DFlash.lints, float16, embedding_scale)
    maths = DFlash2Forward

    @override
    def geometry(self, keys: ConfigReader) -> DFlash2Geometry:
        common, section = self.common_keys(keys), keys.section("dflash_config")
        hidden, vocab = common["hidden_size"], common["vocab_size"]
        group_size = section.positive("conv_group_size")
        if hidden % group_size:
            raise section.wrong("conv_group_size", f"a divisor of hidden_size {hidden}", group_size)
        rows = common["draft_vocab_size"]
        if rows != vocab:
            raise CheckpointError(
                section.where,
                f"draft_vocab_size: expected vocab_size {vocab}, got {rows}: the selector's"
                " candidates are tokens of the target",
                fix="no engine serves a DFlash2 draft of another vocabulary",
            )
        top_k = section.positive("selector_top_k")
        if top_k > vocab:
            raise section.wrong("selector_top_k", f"at most vocab_size {vocab}", top_k)
        # Engines take 0 as none, like a missing key.
        capped = section.config.get("final_logit_softcapping") not in (None, 0)
        return DFlash2Geometry(
            **common,
            conv_kernel_size=section.positive("conv_kernel_size"),
            conv_group_size=group_size,
            selector_rank=section.positive("selector_rank"),
            selector_top_k=top_k,
            input_embedding_scale=section.number("input_embedding_scale", 1.0),
            output_multiplier=section.number("output_multiplier", 1.0),
            final_logit_softcapping=section.number("final_logit_softcapping") if capped else None,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DFlash2Geometry = geometry
        hidden, taps = Dim(g.hidden_size, "hidden_size"), g.conv_kernel_size
        rank, vocab = Dim(g.selector_rank, "selector_rank"), Dim(g.vocab_size, "vocab_size")
        base = (Dim(2, "input and output"), Dim(taps, "conv_kernel_size"), hidden)
        added = Dim(2 * taps * g.num_groups, "conv_kernel_size, hidden_size and conv_group_size")
        shapes = {
            f"layers.{i}.{where}.{name}": shape
            for i in range(g.num_layers)
            for where in _CONVOLUTIONS
            for name, shape in (
                ("base_kernel", base),
                ("kernel_projection.weight", (added, hidden)),
            )
        }
        shapes |= {
            f"{_SELECTOR}predecessor_codebook": (vocab, rank),
            f"{_SELECTOR}successor_codebook": (vocab, rank),
            f"{_SELECTOR}hidden_projection.weight": (rank, hidden),
        }
        specs = {name: TensorSpec(role="proposal", shape=shape) for name, shape in shapes.items()}
        return {**super().tensor_specs(g), **specs}


FAMILY = DFlash2()
