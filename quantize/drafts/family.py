"""The one interface of all draft families, and a draft as its family reads it.

Names are normalised to canonical ones (`layers.0.self_attn.q_proj.weight`) only for reasoning;
written files keep the names that were read.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from ...recipes.packages import rows_beside
from ...recipes.schema import SHARED_ROLES, Role
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .architectures import MARKS
from .config_reader import SECTION, ConfigReader, object_at, with_text_config
from .engine_traits import GATE_UP, MLA_DOWN, QKV, EngineTraits, fused_group, fused_linear
from .forward import DraftForward, OnInput
from .geometry import Geometry
from .maths import Tensor

Level = Literal["warning", "note"]
Weights = Mapping[str, Tensor]
"""Weights by canonical name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """Something that may cost acceptance, or bytes, although the draft is well-formed.

    `fix` is a dotted config.json key -> the value that settles it, empty where only the user knows.
    It changes what engines read, never what this package computes for the draft.
    """

    name: str
    level: Level
    cause: str
    remedy: str
    fix: Mapping[str, Any] = field(default_factory=dict)


def told(row: str, fix: Mapping[str, Any] | None = None, /, **facts: object) -> Lint:
    """A lint in the words of lints.toml, with the facts that they quote of the draft."""
    entry = rows_beside(__file__, "lints")[row]
    said = {key: entry[key][fact] if key in entry else fact for key, fact in facts.items()}
    texts = {key: text.format_map(said) for key, text in entry.items() if isinstance(text, str)}
    texts["name"] = entry.get("name", row)
    return Lint(**texts, fix=fix or entry.get("fix", {}))  # type: ignore[arg-type]


class SpeculatorsForm(NamedTuple):
    """How the speculators package spells the config of one speculators_model_type.

    `architectures`: first that of its config class, then that of its `save_pretrained`;
    `spelled` turns the config and its section of layers into the keys that the family reads.
    """

    architectures: tuple[str, ...]
    spelled: Callable[[ConfigReader, ConfigReader], dict[str, Any]]


LAYER_CONFIG = "transformer_layer_config"
SPECULATORS_MARKS = ("speculators_model_type", "speculators_config", LAYER_CONFIG)
"""Keys that only a config.json in the speculators layout has."""


class Dim(NamedTuple):
    """One expected dimension and the config keys that it follows from."""

    size: int
    follows_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a family expects of one canonical name; a tied tensor is never served itself."""

    role: Role
    shape: tuple[Dim, ...]
    dtypes: tuple[str, ...] = ("BF16", "F16", "F32")
    optional: bool = False
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of a draft, with its canonical name and its role."""

    tensor: TensorInfo
    canonical: str
    role: Role
    given: str | None = None
    """Of a draft that no family reads: the rule that gave the role, "" = none did."""

    @property
    def given_by(self) -> str | None:
        """The same in words; None of a family's own table."""
        return None if self.given is None else self.given or "no rule"

    @property
    def role_and_rule(self) -> str:
        """For a table that people read."""
        return self.role if self.given_by is None else f"{self.role} ({self.given_by})"

    @property
    def module(self) -> str:
        """On-disk name of the module whose weight the tensor is."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def canonical_module(self) -> str:
        """Canonical name of that module."""
        return self.canonical.removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """Last part of the canonical name."""
        return self.canonical_module.rpartition(".")[2]


class Concat(NamedTuple):
    """The linears that read [norm(a); norm(b)], and the norm of a, whose output nothing else reads.

    So its weight may be divided by a power of two if the first half of their columns is multiplied
    by it: the draft computes the same, bit for bit. All are canonical names of weights.
    """

    norm: str
    linears: tuple[str, ...]


class Family(ABC):
    """A kind of draft: `LlamaForCausalLMEagle3` and its relatives are one family."""

    name: str
    architectures: tuple[str, ...]
    prefixes: tuple[tuple[str, str], ...]
    """Name prefixes to replace, in order, to reach the canonical name."""
    served_unquantized: tuple[str, ...]
    """Modules that an engine builds for every draft, even where the draft does not ship them."""
    served_root: str = ""
    """Root of a draft whose layers vLLM counts from 0; empty = it counts after the target's."""
    makes_features: tuple[str, ...]
    """Canonical prefixes of the tensors that turn target features into the draft's first input."""
    layer_keys: str = "num_hidden_layers"
    """The keys of config.json that give the number of layers, for a sentence."""
    one_layer: bool = False
    """Its drafts mostly have one layer, even if config.json has the target's number."""
    linears_per_layer: int | None = None
    """Attention and MLP linears of a layer, where there are fewer than in a decoder layer."""
    shared_tables: tuple[Role, ...] = SHARED_ROLES
    """Tables that engines take from the target for a draft that has none."""
    whole_vocabulary: str | None = "no engine knows fewer rows of its head"
    """Why every draft must propose all of the target's tokens; None where it need not."""
    engine_traits: EngineTraits = EngineTraits()
    layer: ClassVar[re.Pattern[str] | None] = None
    """How its names begin where it is a layer of its target; group 1 is the layer's number."""
    notice: str | None = None
    """What is said of every draft of it, whatever is done with it."""
    inside_target: bool = False
    """Its names and config.json are those of the target that it was trained in."""
    is_whole_model: bool = False
    """It is a language model, which engines load like any other, by its own names."""
    no_cache_scales: str | None = None
    """Why engines read no scales of its KV cache; None = they do."""
    projectors: Mapping[str, str] = MappingProxyType({})
    """projector_type beside the name of DFlash -> the architecture that it means."""
    speculators: Mapping[str, SpeculatorsForm] = MappingProxyType({})
    """The form of each speculators_model_type."""
    misnamed: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """A model_type that engines misread -> the row of lints.toml, and the type that is meant."""
    marks: frozenset[str]
    """Canonical names that occur together only in this family."""
    own_marks: Collection[str] = ()
    """Those of `MARKS` that only its own tensors have."""
    relatives: Mapping[str, str] = MappingProxyType({})
    """Part of a tensor name, a regular expression -> the other kind of draft that has it."""
    maths: type[DraftForward]
    """What every draft of it computes; where drafts differ, `forward` chooses."""
    has_maths: bool = True
    """False of drafts that no family reads: what they compute is not known."""
    lints: tuple[Callable[["Draft"], Iterator[Lint]], ...] = ()
    """Differences between trainers and engines that only drafts of this family have."""

    def foreign_marks(self) -> Mapping[str, str]:
        """Part of a tensor name -> the kind of draft with it, which this family does not read."""
        layers = {mark: kind for mark, kind in MARKS.items() if mark not in self.own_marks}
        return {mark: f"{self.name} with {kind}" for mark, kind in layers.items()} | dict(
            self.relatives
        )

    def canonical_name(self, name: str) -> str:
        """The name that this family's table uses for a tensor spelled `name` on disk."""
        for prefix, replacement in self.prefixes:
            if name.startswith(prefix):
                name = replacement + name[len(prefix) :]
        return name

    def of_folder(self, _geometry: Any, _names: Collection[str]) -> "Family":
        """The family as it names tensors of one folder; itself unless numbers continue there."""
        return self

    def served_name(self, module: str) -> str:
        """Another name by which engines call a kept module; mostly the name on disk."""
        return module

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """True if these tensors have the marks of this family."""
        return self.marks <= set(canonical_names)

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Geometry:
        """The numbers of config.json; CheckpointError where a key is missing or wrong."""
        return self.geometry(ConfigReader(config, where))

    @abstractmethod
    def geometry(self, keys: ConfigReader) -> Geometry:
        """The geometry, read through a `ConfigReader`."""

    @abstractmethod
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        """Every tensor that a draft of this geometry may have, by canonical name."""

    def concat(self, _geometry: Any) -> Concat | None:
        """The concat input of a draft; None where the family has none."""
        return None

    def forward(self, geometry: Any, weights: Weights, on_input: OnInput) -> DraftForward:
        """The forward maths over weights."""
        return self.maths(geometry, weights, on_input)

    def scale_group(self, module: str) -> tuple[str, str]:
        """Of a canonical module: all that engines hold under one scale have the same."""
        parent, leaf = fused_group(module)
        joined = self.engine_traits.joins_layers
        return ("layers" if joined and leaf == joined.fused.vllm else parent), leaf

    def no_maths(self, _geometry: Any) -> str | None:
        """Why what a draft computes is not computed here; None where it is."""
        if self.has_maths:
            return None
        return "no family reads it, so what it computes along traces is not known"

    def side_weights(self, _geometry: Any, _folder: Path) -> Weights:
        """Weights that engines read from other files of the folder; mostly none."""
        return {}


_MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")
"""Keys of eagle_config that only ModelOpt's export templates write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that a family has read: every tensor has a role and the expected shape."""

    checkpoint: Checkpoint
    family: Family
    geometry: Geometry
    rows: tuple[Row, ...]

    def row(self, canonical: str) -> Row | None:
        """The row of a canonical name, None where the draft does not have that tensor."""
        return next((row for row in self.rows if row.canonical == canonical), None)

    def linears(self) -> tuple[Row, ...]:
        """The 2-D weights, in the order of `rows`."""
        return tuple(row for row in self.rows if len(row.tensor.shape) == 2)

    def concat_linears(self) -> tuple[Row, ...]:
        """The linears that read the concat input, in the order of `rows`; none without one."""
        concat = self.family.concat(self.geometry)
        linears = concat.linears if concat else ()
        return tuple(row for row in self.linears() if row.canonical in linears)

    def fused_groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of on-disk module names that engines fuse, present members only."""
        return self._groups(fused_group)

    def scale_groups(self) -> tuple[tuple[str, ...], ...]:
        """The same of what they hold under one scale, whole layers' linears among them."""
        return self._groups(self.family.scale_group)

    def _groups(self, of: Callable[[str], tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if fused_linear(row.leaf) is not None:
                groups.setdefault(of(row.canonical_module), []).append(row.module)
        return tuple(map(tuple, groups.values()))

    @property
    def is_mla(self) -> bool:
        """True for MLA."""
        return self.checkpoint.config.get("kv_lora_rank") is not None

    @property
    def in_speculators_layout(self) -> bool:
        """True for the layout that vLLM translates and SGLang does not know."""
        return any(self.checkpoint.config.get(key) is not None for key in SPECULATORS_MARKS)

    @property
    def is_torchspec(self) -> bool:
        """True if TorchSpec's exporter signed config.json."""
        return "_torchspec_version" in self.checkpoint.config

    @property
    def is_modelopt(self) -> bool:
        """True if ModelOpt's exporter wrote config.json."""
        section = object_at(self.checkpoint.config, SECTION)
        return any(key in section for key in _MODELOPT_KEYS)

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """The keys of the decoder layers, which the speculators layout and others nest."""
        config = self.checkpoint.config
        nested: Mapping[str, Any] = config.get(LAYER_CONFIG) or {}
        return nested if self.in_speculators_layout else with_text_config(config)


MOST_OF_NORM = 2.0
"""Limit on the factor by which learning may multiply or divide an element of a norm's weight. A
power of two: rounding to the dtype of the norm cannot exceed it."""
_ATTENTION = (*QKV.members, *MLA_DOWN.members)
_READERS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": _ATTENTION,
    "hidden_norm": _ATTENTION,
    "post_attention_layernorm": GATE_UP.members,
    "q_a_layernorm": ("q_b_proj",),
    "kv_a_layernorm": ("kv_b_proj",),
}
"""Last part of a norm's name -> those of the linears of its layer that read it."""


def norms_before(draft: Draft, quantized: Collection[str]) -> tuple[Row, ...]:
    """The weights of norms that only quantized linears and residual streams read, in file order.

    They may learn with the codes (`norms: learned`): their readers round inputs and weights
    anyway. A norm that anything kept reads stays: fc, the head, a router, `kv_b_proj`.
    `quantized` are on-disk names of modules.
    """
    return tuple(row for row in draft.rows if row.role == "norm" and _learns(row, draft, quantized))


def _learns(norm: Row, draft: Draft, quantized: Collection[str]) -> bool:
    layer, leaf = _layer(norm), norm.leaf
    if layer is None or not norm.canonical.endswith(".weight") or leaf not in _READERS:
        return False
    inside = [row for row in draft.rows if _layer(row) == layer]
    routed = leaf == "post_attention_layernorm" and any(row.role == "router" for row in inside)
    readers = [row for row in inside if row.leaf in _READERS[leaf]]
    return bool(readers) and not routed and all(row.module in quantized for row in readers)


def _layer(row: Row) -> str | None:
    """The number of its layer; None outside the layers."""
    root, number, *_ = (*row.canonical.split("."), "")
    return number if root == "layers" else None
