"""Multi-token prediction (MTP, NextN) layers: what all their families share.

One decoder layer that a target was trained with. It reads the target's last hidden state, behind
the final norm, and the next token's embedding: each normed, concatenated, and mapped to one row by
a linear that we call fc. Further draft tokens come of the same layer, fed with its own output; or,
of several modules of that kind, from the next one, fed with what the one before gave.

Canonical names are those of the other families: `fc` (eh_proj, input_proj), `norm`
(shared_head.norm, final_layernorm), `lm_head` (shared_head.head); `embedding_norm` and `state_norm`
go before fc. The layer's number among the target's is left out: it is `layers.0`. Of the modules
after the first the layers are `layers.1`, ..., and what stands around them `modules.1.fc`, ....

Sources: `*_mtp.py` of vLLM 0.33 and `*_nextn.py`, `*_mtp.py` of SGLang 0.5.23 (`models/`).
"""

import copy
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from .....recipes.errors import CheckpointError
from ...architectures import MARKS
from ...config_reader import ConfigReader
from ...family import Dim, Family, TensorSpec
from ...rope import read_rope
from ..attention.names import (
    Shapes,
    grouped_shapes,
    head_norm_shapes,
    input_bias_shapes,
    weight_names,
)
from ..mixture.names import mixture_shapes, mlp_shapes
from .geometry import MtpGeometry, MtpGroupedGeometry, around_layer

if TYPE_CHECKING:
    import torch

    from ...forward import DraftForward, OnInput
    from ..attention.forward import Attention


AROUND_DEEPSEEKS: Mapping[str, str] = {
    "eh_proj": "fc",
    "enorm": "embedding_norm",
    "hnorm": "state_norm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
"""What stands around the layer in DeepSeek's spelling, which GLM has too; see `Mtp.outer`."""


class Mtp(Family):
    """Tensor table and forward maths over what a family adds: attention, MLP, and the order."""

    layer: ClassVar[re.Pattern[str]]
    """The beginning of the names of the layer's tensors on disk; group 1, if any, its number."""
    outer: ClassVar[Mapping[str, str]]
    """Module below it that is no part of the decoder layer -> its canonical name."""
    mark: ClassVar[str] = "self_attn.q_proj"
    """The linear that tells its attention from others."""
    foreign: ClassVar[str] = "self_attn.g_proj"
    """A linear that it has not, and a family of otherwise the same names has."""
    state_first: ClassVar[bool]
    """Fc reads [state; embedding], not [embedding; state]."""
    masks_first: ClassVar[bool] = True
    """The embedding at position 0 is taken for zeros."""
    feeds_back_normed: ClassVar[bool]
    """The next step reads the layer's output behind its last norm, as the head does."""
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
    """The number on disk of the first of several modules; None = there is one, of any number."""

    @override
    def of_folder(self, geometry: Any, names: Collection[str]) -> "Mtp":
        # Of several modules the first is the one of the lowest number.
        if geometry.num_layers == 1:
            return self
        numbers = [int(found[1]) for found in map(self.layer.match, names) if found is not None]
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

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Both norms before fc, under the names of this family, and its attention."""
        marks = {"embedding_norm.weight", "state_norm.weight", f"layers.0.{self.mark}.weight"}
        names = set(canonical_names)
        return marks <= names and f"layers.0.{self.foreign}.weight" not in names

    @abstractmethod
    def attention_shapes(self, geometry: Any) -> Shapes:
        """The tensors of the attention."""

    @abstractmethod
    def attention(self, geometry: Any) -> "Attention":
        """The projections of the forward maths; imports torch."""

    @override
    def tensor_specs(self, geometry: MtpGeometry) -> Mapping[str, TensorSpec]:
        hidden = Dim(geometry.hidden_size, "hidden_size")
        vocab = Dim(geometry.vocab_size, "vocab_size")
        both = Dim(2 * geometry.hidden_size, "2 x hidden_size")
        norm = TensorSpec(role="norm", shape=(hidden,))
        around = {
            "embed_tokens": TensorSpec(role="embedding", shape=(vocab, hidden), optional=True),
            "lm_head": TensorSpec(role="head", shape=(vocab, hidden), optional=True),
            "fc": TensorSpec(role="fusion", shape=(hidden, both)),
            "embedding_norm": norm,
            "state_norm": norm,
            "norm": norm,
        }
        inner = Dim(geometry.intermediate_size, "intermediate_size")
        mlp = (
            mlp_shapes("mlp.", inner, hidden)
            if geometry.mixture is None
            else mixture_shapes(geometry.mixture, hidden)
        )
        layer = self.attention_shapes(geometry) | mlp
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        table: dict[str, TensorSpec] = {}
        for i in range(geometry.num_layers):
            table |= {f"{around_layer(i, name)}.weight": spec for name, spec in around.items()}
            table |= {f"layers.{i}.{name}": norm for name in norms}
            table |= {
                f"layers.{i}.{name}": TensorSpec(role=role, shape=shape)
                for name, (role, shape) in layer.items()
            }
        return table

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "DraftForward":
        from .forward import MtpForward, MtpModules

        modules = [
            MtpForward(
                geometry,
                weights,
                on_input,
                self.attention(geometry),
                number=number,
                state_first=self.state_first,
                masks_first=self.masks_first,
                feeds_back_normed=self.feeds_back_normed,
                zero_centred=self.zero_centred,
            )
            for number in range(geometry.num_layers)
        ]
        return modules[0] if len(modules) == 1 else MtpModules(modules)


class GroupedMtp(Mtp):
    """With grouped-query attention."""

    @override
    def attention_shapes(self, geometry: Any) -> Shapes:
        return grouped_attention_shapes(geometry)

    @override
    def attention(self, geometry: MtpGroupedGeometry) -> "Attention":
        from ..attention.forward import LlamaAttention

        return LlamaAttention(
            head_dim=geometry.head_dim,
            rope=geometry.rope,
            qk_norm=geometry.qk_norm,
            rotary_dim=geometry.rotary_dim,
        )


def read_mtp(
    config: Mapping[str, Any], where: object, family: str, *, several: bool = False
) -> dict[str, Any]:
    """The fields of `MtpGeometry`, from the config.json of the target that the layer belongs to.

    Args:
        family: the name of the family, for errors.
        several: an engine serves several modules of this family, one in each draft step.

    Raises:
        CheckpointError: a key is missing or wrong, or the target has not exactly one MTP layer,
            nor several that are served.
    """
    keys = ConfigReader(config, where)
    layers = config.get("num_nextn_predict_layers", 1)
    if layers == 0 and type(layers) is int:
        raise CheckpointError(
            where,
            "num_nextn_predict_layers: 0: this is a whole model without an MTP layer, and no draft",
            fix="give a draft, or a target that has an MTP layer, with --subtree",
        )
    if type(layers) is not int or layers < 1 or (layers > 1 and not several):
        raise CheckpointError(
            where,
            f"num_nextn_predict_layers: expected 1, got {layers!r}: engines serve {family} with one"
            " layer, of which all draft tokens come",
            fix="correct it to what is stored; several layers of this family no engine serves",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            where,
            f"hidden_act: expected 'silu', as {family} is served, got {activation!r}",
            fix="use another draft: this one cannot be replayed or served as it was trained",
        )
    return {
        "num_layers": layers,
        "hidden_size": keys.positive("hidden_size"),
        "intermediate_size": keys.positive("intermediate_size"),
        "num_attention_heads": keys.positive("num_attention_heads"),
        "vocab_size": keys.positive("vocab_size"),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(config, where),
    }


def grouped_attention_shapes(geometry: MtpGroupedGeometry) -> Shapes:
    """The tensors of grouped-query attention, with the biases, norms and gate that it has."""
    g = geometry
    hidden = Dim(g.hidden_size, "hidden_size")
    linears = grouped_shapes(g, hidden)
    if g.output_gate:
        both = Dim(2 * g.num_attention_heads * g.head_dim, "2 x num_attention_heads x head_dim")
        linears["self_attn.q_proj"] = ("attention", (both, hidden))
    shapes = weight_names(linears)
    if g.qkv_bias:
        shapes |= input_bias_shapes(linears)
    if g.qk_norm:
        shapes |= weight_names(head_norm_shapes(g))
    return shapes


def rotated_part(keys: ConfigReader, default: float) -> tuple[float, dict[str, Any]]:
    """The share of a head that is rotated, and config.json without it.

    Args:
        default: where it has none.

    Raises:
        CheckpointError: it is no number above 0 and up to 1.
    """
    key, spelled = "partial_rotary_factor", "rope_parameters"
    nested = keys.section(spelled)
    part = nested.number(key, keys.number(key, default))
    if part > 1:
        raise CheckpointError(
            keys.where, f"{key}: expected at most 1, got {part:g}", fix=f"correct {key!r}"
        )
    rest = {name: value for name, value in keys.config.items() if name != key}
    if keys.config.get(spelled) is not None:
        rest[spelled] = {n: v for n, v in nested.config.items() if n != key}
    return part, rest
