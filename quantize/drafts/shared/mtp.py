"""Multi-token prediction (MTP, NextN) layers: what all their families share.

One decoder layer that a target was trained with. It reads the target's last hidden state, after
the final norm, and the next token's embedding: each is normed, both are concatenated, and a linear
that we call fc maps them to one row. Further draft tokens come from the same layer, fed with its
own output; or, with several modules, from the next one, fed with the output of the one before.

Canonical names are those of the other families; `embedding_norm` and `state_norm` precede fc. The
layer's number among the target's is left out: it is `layers.0`. Layers of modules after the first
are `layers.1`, ..., and the tensors around them `modules.1.fc`, ....

Sources: `*_mtp.py` of vLLM 0.33 and `*_nextn.py`, `*_mtp.py` of SGLang 0.5.23 (`models/`); loading
was executed with the engines' own classes (`experiments/engines/mtp.json`).
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..architectures import MARKS
from ..config_reader import ConfigReader
from ..engine_traits import EngineTraits, InSglang, InVllm, MtpLayer, ServedDraft
from ..family import Dim, Family, TensorSpec, Weights
from ..forward import Attend, DraftForward, OnInput
from ..geometry import RotatedGeometry, TokenLimit, last_state
from ..maths import Tensor, embedding, rms_norm, torch
from ..passes import ChainForward, StagedForward
from . import layers as decoder
from .mixture import Mixture, mixture_mlp, mixture_shapes

_WHY = (
    "the draft has a module for each of so many tokens, and in the steps after them an engine"
    " writes over the keys that the first steps of the next round look at"
)


def mtp_traits(
    architectures: frozenset[str],
    *,
    vllm: MtpLayer,
    sglang: MtpLayer,
    more_in_sglang: frozenset[str] = frozenset(),
    **more: Any,
) -> EngineTraits:
    """What engines know of a target's MTP layer in a folder of its own."""
    return EngineTraits(
        vllm=InVllm(architectures=architectures, served_as="mtp", mtp=vllm),
        sglang=InSglang(
            architectures=architectures | more_in_sglang, served_as="EAGLE", mtp=sglang
        ),
        **more,
    )


def floats_beside_nvfp4(layer: str) -> Callable[[ServedDraft], Mapping[str, str]]:
    """`MtpLayer.floats` where SGLang takes ModelOpt's NVFP4 to leave the layer out.

    Source: `glm4_moe_nextn.py:52`, `deepseek_nextn.py:75`, `qwen3_5_mtp.py:58`.
    """
    what = "SGLang builds this layer in BF16 where ModelOpt's NVFP4 is declared"

    def floats(draft: ServedDraft) -> Mapping[str, str]:
        return {layer: f"use another format: {what}"} if draft.is_nvfp4_of_modelopt else {}

    return floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpGeometry(RotatedGeometry):
    """Config of one MTP layer, or of several modules; without a mixture it has an MLP."""

    mixture: Mixture | None = None

    @property
    @override
    def num_modules(self) -> int:
        return self.num_layers

    @property
    @override
    def token_limit(self) -> TokenLimit | None:
        return TokenLimit(self.num_modules, _WHY) if self.num_modules > 1 else None


AROUND_DEEPSEEKS: Mapping[str, str] = {
    "eh_proj": "fc",
    "enorm": "embedding_norm",
    "hnorm": "state_norm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
"""`Mtp.outer` in DeepSeek's spelling, which GLM has too."""


class Mtp(Family):
    """Tensor table and forward maths; families add attention, MLP, and the order of fc's inputs."""

    layer: ClassVar[re.Pattern[str]]
    """How the names of the layer's tensors on disk begin; group 1, if any, is its number."""
    outer: ClassVar[Mapping[str, str]]
    """Module below it that is not part of the decoder layer -> its canonical name."""
    mark: ClassVar[str] = "self_attn.q_proj"
    """The linear that distinguishes its attention from others."""
    foreign: ClassVar[str] = "self_attn.g_proj"
    """A linear that it lacks, and that a family with otherwise the same names has."""
    state_first: ClassVar[bool]
    """Fc reads [state; embedding], not [embedding; state]."""
    masks_first: ClassVar[bool] = True
    """The embedding at position 0 is replaced by zeros."""
    feeds_back_normed: ClassVar[bool]
    """The next step reads the layer's output after its last norm, as the head does."""
    zero_centred: ClassVar[bool] = False
    """Norms multiply by 1 + weight."""

    inside_target = True
    own_marks = tuple(MARKS)
    layer_keys = "num_nextn_predict_layers"
    prefixes = ()
    whole_vocabulary = "it is a layer of its target, which engines give the target's whole head"
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ()
    first: int | None = None
    """The number on disk of the first of several modules; None = there is only one."""

    @override
    def of_folder(self, geometry: Any, names: Collection[str]) -> "Mtp":
        # Of several modules the first is the one with the lowest number.
        if geometry.num_layers == 1:
            return self
        numbers = [int(match[1]) for match in map(self.layer.match, names) if match is not None]
        several = copy.copy(self)
        several.first = min(numbers, default=0)
        return several

    @override
    def canonical_name(self, name: str) -> str:
        begins = self.layer.match(name)
        if begins is None:
            return name.removeprefix("model.") if name.startswith("model.embed_tokens.") else name
        path, number = name[begins.end() :], 0
        if self.first is not None:
            number = int(begins[1]) - self.first
        for module, canonical in self.outer.items():
            if path == module or path.startswith(f"{module}."):
                return around_layer(number, canonical) + path[len(module) :]
        return f"layers.{number}.{path}"

    @override
    def recognises(self, canonical_names: Collection[str]) -> bool:
        # Both norms before fc, under the names of this family, and its attention.
        marks = {"embedding_norm.weight", "state_norm.weight", f"layers.0.{self.mark}.weight"}
        names = set(canonical_names)
        return marks <= names and f"layers.0.{self.foreign}.weight" not in names

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: MtpGeometry = geometry
        hidden, vocab = decoder.dims(g, "hidden_size", "vocab_size")
        both = Dim(2 * g.hidden_size, "2 x hidden_size")
        norm = TensorSpec(role="norm", shape=(hidden,))
        around = {
            "embed_tokens": TensorSpec(role="embedding", shape=(vocab, hidden), optional=True),
            "lm_head": TensorSpec(role="head", shape=(vocab, hidden), optional=True),
            "fc": TensorSpec(role="fusion", shape=(hidden, both)),
            "embedding_norm": norm,
            "state_norm": norm,
            "norm": norm,
        }
        mlp = None if g.mixture is None else mixture_shapes(g.mixture, hidden)
        table: dict[str, TensorSpec] = {}
        for i in range(g.num_layers):
            table |= {f"{around_layer(i, name)}.weight": spec for name, spec in around.items()}
            table |= decoder.layer_specs(g, i, mlp=mlp)
        return table

    @override
    def forward(self, geometry: Any, weights: Weights, on_input: OnInput) -> DraftForward:
        modules = [
            MtpForward(geometry, weights, on_input, family=self, number=number)
            for number in range(geometry.num_layers)
        ]
        return modules[0] if len(modules) == 1 else MtpModules(modules)


def read_mtp(
    keys: ConfigReader, family: str, *, several: bool = False, part: float | None = None
) -> dict[str, Any]:
    """The fields of `MtpGeometry`, from the config.json of the target that the layer belongs to.

    `several`: whether a family's modules are served one per draft step, or only one; `part`: as in
    `read_rope`.
    """
    layers = keys.config.get("num_nextn_predict_layers", 1)
    if layers == 0 and type(layers) is int:
        raise CheckpointError(
            keys.where,
            "num_nextn_predict_layers: 0: this is a whole model without an MTP layer, and no draft",
            fix="give a draft, or a target that has an MTP layer, with --subtree",
        )
    counts = type(layers) is int and (layers == 1 or (layers > 1 and several))
    if not counts:
        raise CheckpointError(
            keys.where,
            f"num_nextn_predict_layers: expected 1, got {layers!r}: engines serve {family} with"
            " one layer, which proposes all draft tokens",
            fix="correct it to what is stored; several layers of this family no engine serves",
        )
    decoder.check_silu(keys, family)
    keys.positive("num_hidden_layers", 1)  # engines count from it
    return last_state(decoder.read_sizes(keys, layers, part))


def around_layer(number: int, name: str) -> str:
    """The canonical name of a tensor around a module's decoder layer."""
    return f"modules.{number}.{name}" if number else name


class MtpForward(decoder.LayersForward, ChainForward):
    """One MTP module; its rows are those of EAGLE-3."""

    geometry: MtpGeometry

    def __init__(
        self, geometry: MtpGeometry, weights: Weights, on_input: OnInput, family: Mtp, number: int
    ) -> None:
        super().__init__(geometry, weights, on_input)
        self.family = family
        self.number = number

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        r = self.linear(self._around("fc"), self._both(token_ids, hidden, positions))
        x = self.layer(self.number, r, positions, attend)
        return self.norm(self._around("norm"), x) if self.family.feeds_back_normed else x

    @override
    def mlp(self, number: int, z: Tensor) -> Tensor:
        mixture = self.geometry.mixture
        if mixture is None:
            return super().mlp(number, z)
        return mixture_mlp(mixture, f"layers.{number}.mlp.", z, self)

    @override
    def head(self) -> Tensor:
        return self.weights[f"{self._table('lm_head')}.weight"]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        fed_back = self.family.feeds_back_normed
        normed = hidden if fed_back else self.norm(self._around("norm"), hidden)
        return self.on_input(self._table("lm_head"), normed)

    @override
    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self.weights[f"{name}.weight"], self.geometry.rms_norm_eps
        if not self.family.zero_centred:
            return rms_norm(x, weight, eps)
        wide = torch.promote_types(x.dtype, torch.float32)  # rounded once: 1 + weight needs bits
        return rms_norm(x.to(wide), 1 + weight.to(wide), eps).to(x.dtype)

    def _around(self, name: str) -> str:
        return around_layer(self.number, name)

    def _table(self, name: str) -> str:
        """The module's own table; where it has none, that of the first module or of the target."""
        module_table = self._around(name)
        return module_table if f"{module_table}.weight" in self.weights else name

    def _both(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        table = self.weights[f"{self._table('embed_tokens')}.weight"]
        embedded = embedding(token_ids, table, hidden.dtype)
        if self.family.masks_first:
            embedded = embedded * (positions > 0)[:, None]
        e = self.norm(self._around("embedding_norm"), embedded)
        u = self.norm(self._around("state_norm"), hidden)
        return torch.cat((u, e) if self.family.state_first else (e, u), dim=-1)


class MtpModules(StagedForward):
    """Several modules, of which module i drafts token i + 1."""

    def __init__(self, modules: Sequence[MtpForward]) -> None:
        geometry = modules[0].geometry
        super().__init__(geometry, modules[0].weights, modules[0].on_input)
        self.modules = modules
        self.window = geometry.window_of(0)
