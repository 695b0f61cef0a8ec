"""What engines know of a family: the facts in which its drafts differ from ordinary ones.

The defaults are the ordinary case, a chain of EAGLE-3 layers. Engines read these facts and name no
family. Those of vLLM hold for 0.33.0, those of SGLang for 0.5.23: loading was executed with the
engines' own classes (`experiments/engines/RESULTS.md`), whose error texts these are. Those of
TensorRT-LLM were read in its main branch. Which linears engines fuse is the same for every
family: both engines agree, except on the down-projections of MLA.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..files.checkpoint import Checkpoint
from .config_reader import KEY, SECTION, object_at, with_text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """One linear of an engine, and those of the draft that form it; last parts of names."""

    members: tuple[str, ...]
    vllm: str
    sglang: str

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, vLLM's first."""
        return tuple(dict.fromkeys((self.vllm, self.sglang)))


QKV = FusedLinear(members=("q_proj", "k_proj", "v_proj"), vllm="qkv_proj", sglang="qkv_proj")
GATE_UP = FusedLinear(members=("gate_proj", "up_proj"), vllm="gate_up_proj", sglang="gate_up_proj")
MLA_DOWN = FusedLinear(
    members=("q_a_proj", "kv_a_proj_with_mqa"),
    vllm="fused_qkv_a_proj",
    sglang="fused_qkv_a_proj_with_mqa",
)
FUSED_LINEARS = (QKV, GATE_UP, MLA_DOWN)


def fused_linear(leaf: str) -> FusedLinear | None:
    """The fused linear that a module belongs to; `leaf` is the last part of the module's name."""
    return next((fused for fused in FUSED_LINEARS if leaf in fused.members), None)


def fused_names(module: str) -> tuple[str, ...]:
    """The linears into which engines fuse a module; empty where they do not fuse it."""
    parent, dot, leaf = module.rpartition(".")
    fused = fused_linear(leaf)
    return tuple(f"{parent}{dot}{name}" for name in fused.names) if fused else ()


def fused_group(module: str) -> tuple[str, str]:
    """Parent and leaf of the linear into which vLLM fuses a module; its own where it does not."""
    parent, _, leaf = module.rpartition(".")
    fused = fused_linear(leaf)
    return parent, fused.vllm if fused else leaf


Stage = Literal["config", "init", "load", "unknown", "wrong", "after load"]
Sharding = Literal["column", "row", "replicated"]
Linear = tuple[str, tuple[str, ...], Sharding]
"""A linear of a layer as an engine builds it: its path there, its parts, and how it is split."""

INVALID = "ValidationError: 1 validation error for SpeculativeConfig Value error, {}"
"""How vLLM refuses a config.json."""
UNSUPPORTED = INVALID.format("Model architectures ['{}'] are not supported for now.")


class Finding(NamedTuple):
    """One thing that an engine does not do as the folder means it, in the engine's words."""

    stage: Stage
    text: str
    remedy: str


ConfigRead = dict[str, Any] | Finding
"""The keys of a config.json as an engine reads them, or why it does not read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGpu:
    """A GPU about which rules ask, and what they asked: a GPU that answers alike is judged alike.

    Attributes:
        asked: the architectures of each question, in order.
    """

    arch: str
    asked: list[Collection[str]] = field(default_factory=list)

    def is_one_of(self, archs: Collection[str]) -> bool:
        """Whether it is one of these; the question is written down."""
        self.asked.append(archs)
        return self.arch in archs

    def answers_for(self, arch: str) -> bool:
        """Whether another one would have given the same answers."""
        return all((arch in archs) == (self.arch in archs) for archs in self.asked)


@dataclass(frozen=True, kw_only=True)
class ServedDraft(ABC):
    """The facts of a folder that a family's own rules for an engine may use.

    Attributes:
        checkpoint: its headers, and config.json as the engine reads it.
        geometry: what the engine builds by that.
        tp: tensor-parallel shards.
    """

    checkpoint: Checkpoint
    geometry: Any
    tp: int
    gpu: AskedGpu

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The keys of config.json, with those of a multimodal target's text section."""
        return with_text_config(self.checkpoint.config)

    @property
    def tensor_names(self) -> Collection[str]:
        """As they are stored."""
        return self.checkpoint.tensors.keys()

    @property
    def num_layers(self) -> int:
        """The draft's own decoder layers."""
        return int(self.geometry.num_layers)

    @property
    @abstractmethod
    def head_rows(self) -> int | None:
        """Rows of the stored lm_head; None where there is none."""

    @property
    @abstractmethod
    def method(self) -> str | None:
        """The declared quant_method."""

    @property
    @abstractmethod
    def is_nvfp4_of_modelopt(self) -> bool:
        """Whether some classes build an MTP layer in BF16 by what is declared."""


Problem = Callable[[ServedDraft], Finding | None]
"""A rule for config.json and the names of tensors; None = no problem."""
Unknown = Literal["refused", "dropped", "unknown"]
Roots = Mapping[str, Finding | None]
"""Prefix of tensor names -> what an engine makes of them; None = the same as without the prefix."""


def no_problem(_draft: ServedDraft) -> Finding | None:
    """The rule without any problem."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """How an engine's class sizes fc, which reads the hidden states of several layers.

    Attributes:
        counted_by: keys of config.json; the first one with a value, a number or a list, gives the
            number of layers: 3 where none has one. () = as many as the draft names.
        counts_empty: an empty list means no layers, rather than no value.
        refuses_null: a target_hidden_size of null is an error; else hidden_size is used.
        reads_width: False where the width is always hidden_size.
    """

    counted_by: tuple[str, ...] = ("num_aux_hidden_states", f"{SECTION}.{KEY}")
    counts_empty: bool = False
    refuses_null: bool = True
    reads_width: bool = True

    def num_layers(self, config: Mapping[str, Any]) -> Any:
        """The number of layers by config.json; maybe not a number."""
        for path in self.counted_by:
            section, _, key = path.rpartition(".")
            value = (object_at(config, section) if section else config).get(key)
            if value is not None and (value != [] or self.counts_empty):
                return len(value) if isinstance(value, list) else value
        return 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """How one engine builds a target's MTP layer from a folder of its own.

    Attributes:
        layer: the name of the decoder layer, with {n} for its number after the target's.
        prefix: the prefix that excludes are compared with, "" = none; `prefixes` for architectures.
        attention: what replaces "self_attn." in the name of the layer's attention.
        own_heads: each module is built with a head of its own, with this name, with {n}.
        head: what excludes call the head that it builds, with {n}; by another name than lm_head the
            method of the declaration takes it, before it is the target's.
        misconfigured: keys and tensors without which it does not build the layer.
        cache_scales: whether it reads `self_attn.attn.k_scale`, or drops it; None = not executed.
        declared: what it says of a declaration, where it reads the folder's own, not the target's.
        lists_parts: its class lists what it fuses, so that excludes may name the parts.
        fc: the name of fc in excludes; "" = it is never quantized.
        floats: prefixes, as in excludes, of the names of linears that it builds unquantized
            whatever is declared -> what to do where they are stored quantized.
    """

    layer: str
    prefix: str
    prefixes: Mapping[str, str] = field(default_factory=dict)
    attention: str = "self_attn."
    own_heads: str = ""
    head: str = "lm_head"
    misconfigured: Problem = no_problem
    cache_scales: bool | None = None
    declared: Problem | None = None
    lists_parts: bool = False
    fc: str = ""
    floats: Callable[[ServedDraft], Mapping[str, str]] = lambda _draft: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InEngine:
    """Drafts of one family in one engine.

    Attributes:
        architectures: the names in config.json for which loading was executed.
        as_another: names of other drafts -> what it does with an unquantized one that is called so.
        served_as: the draft's name in the command that serves it.
        problem: its rules for config.json and for names of tensors of these drafts.
        unknown_tensors: what happens to a tensor that has no parameter.
        shares_tables: embedding and head always come from the target.
        targets_on_disk: quant_methods whose targets it finds by the parts' names on disk.
        classes_first: targets match a fused linear by its class before they do by its parts' names.
        normed_fusion: replaces `fusion` for drafts with normed heads.
        linears: those of a layer, with the last parts of what forms them; () = the ordinary ones.
        fc: what its class calls fc. fc_sharding: how that is split.
        quantizes_fc: drafts of which it quantizes fc and linears outside the layers where they are
            plain in others, has the embedding from the draft, and compares excludes with whole
            names.
        mtp: None for drafts with a config.json of their own.
    """

    architectures: frozenset[str] = frozenset()
    as_another: Mapping[str, Finding] = field(default_factory=dict)
    served_as: str = ""
    problem: Problem = no_problem
    unknown_tensors: Unknown = "unknown"
    roots: Roots = field(default_factory=dict)
    shares_tables: bool = False
    targets_on_disk: frozenset[str] = frozenset()
    classes_first: bool = False
    fusion: Fusion | None = None
    normed_fusion: Fusion | None = None
    linears: tuple[Linear, ...] = ()
    fc: str = "model.fc"
    fc_sharding: Sharding = "replicated"
    quantizes_fc: Callable[[ServedDraft], bool] = lambda _draft: False
    mtp: MtpLayer | None = None


class Speculators(NamedTuple):
    """How vLLM reads one kind of config.json from speculators.

    Attributes:
        read: (config.json, its keys of the layers) -> those of the ordinary form, or its error.
        qwen3: the layers are Qwen3's, whatever model_type says.
    """

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], ConfigRead]
    qwen3: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InVllm(InEngine):
    """Drafts of one family in vLLM.

    Attributes:
        not_executed: other names of these drafts that are registered.
        head_declared: whether its class passes the declaration to the head, or if config.json asks.
        forgets_attention: with normed heads it builds qkv_proj under a prefix without self_attn.
        maps_excludes: ModelOpt's excludes are first renamed: `map_draft_quant_config`.
        counts_from_0: excludes number its layers as the files do.
        rope_by_layer: its class takes the rope of each layer's type.
    """

    served_as: str = "eagle3"
    unknown_tensors: Unknown = "refused"
    not_executed: frozenset[str] = frozenset()
    head_declared: Literal["always", "asked", "never"] = "never"
    forgets_attention: bool = False
    maps_excludes: bool = False
    counts_from_0: bool = False
    rope_by_layer: bool = False
    speculators: Mapping[str, Speculators] = field(default_factory=dict)

    @property
    def takes_online_heads(self) -> bool:
        """`draft_lm_head_quantization` is for this method: `config/speculative.py:1955`."""
        return self.served_as in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class InSglang(InEngine):
    """Drafts of one family in SGLang.

    Attributes:
        layer_name: the name of a linear of layer {n}; {path} is its name in the layer, {leaf} the
            last part of that. layer_prefix: the name that excludes are compared with; {inner} is
            {path} of o_proj, else {leaf}.
        plain_fc: fc is never quantized.
        most_layers: how many layers may be declared; None = as many as there are.
        needs_draft_vocab_size: without the key it does not build the draft.
        counts_anchor: the command that serves it counts the anchor among the draft tokens.
        attention_backend: which that command has to name; "" = none.
        renames_block_scales: names of whole models whose loader renames scales of blocks.
    """

    served_as: str = "EAGLE3"
    classes_first: bool = True
    unknown_tensors: Unknown = "dropped"
    layer_name: str = "model.layers.{n}.{path}"
    layer_prefix: str = "model.{inner}"
    plain_fc: bool = True
    most_layers: int | None = None
    needs_draft_vocab_size: bool = False
    counts_anchor: bool = False
    attention_backend: Callable[[ServedDraft], str] = lambda _draft: ""
    renames_block_scales: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class InTensorRtLlm(InEngine):
    """Drafts of one family in TensorRT-LLM; `read`: its loading code was read to the end."""

    served_as: str = "Eagle3"
    read: bool = False


class ExtraLinear(NamedTuple):
    """A linear outside the layers, by its canonical name: vLLM puts "model." before it.

    `is_head`: vLLM builds it as a head, which is quantized where heads are.
    """

    name: str
    is_head: bool = False

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


class JoinedLayers(NamedTuple):
    """A linear of vLLM's that is made of one part of every layer's `fused`, for the context.

    It is declared as the first layer's `fused` is. So all layers' members of that have one format,
    and what the engine takes once of a linear, such as a scale of the whole matrix.
    """

    name: str
    fused: FusedLinear
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What engines know of a family.

    Attributes:
        drafts_blocks: engines load it as DFlash: a block in one pass, and the target's tables.
        whole_model: it is an ordinary model, served as a draft.
        convolutions: blocks of a layer that end in a kernel_projection.
        module_names: modules outside the layers that no other family has, as regular expressions:
            the names on disk with which loading was executed.
        shared_experts: the block of a mixture that every token sees.
        prunes_vocabulary: its head may have fewer rows than the vocabulary, and a map d2t.
        own_types: a tool's own model_type that no engine knows -> what to do.
        joins_layers: what is one linear over all layers; None = nothing.
        usual_type: the model_type whose config class has the defaults of its layers; "" = any.
        more_types_than_layers: model_types for which engines' own config lists its layers too.
    """

    drafts_blocks: bool = False
    whole_model: bool = False
    head: Literal["own", "unless tied"] = "own"
    latent: bool = False
    convolutions: tuple[str, ...] = ()
    extra_linears: tuple[ExtraLinear, ...] = ()
    module_names: tuple[str, ...] = ()
    shared_experts: str = "shared_experts"
    norm_before_fc: bool = False
    prunes_vocabulary: bool = False
    joins_layers: JoinedLayers | None = None
    own_types: Mapping[str, str] = field(default_factory=dict)
    usual_type: str = ""
    more_types_than_layers: frozenset[str] = frozenset()
    vllm: InVllm = field(default_factory=InVllm)
    sglang: InSglang = field(default_factory=InSglang)
    tensorrt_llm: InTensorRtLlm = field(default_factory=InTensorRtLlm)

    @property
    def is_mtp(self) -> bool:
        """Whether it is a target's MTP layer, which has the target's config.json."""
        return self.vllm.mtp is not None or self.sglang.mtp is not None


def refused_roots(class_name: str, *names: str) -> Roots:
    """For vLLM, which puts "model." before every name except the head's: `llama_eagle3.py:444`."""
    return {
        f"{name}.": Finding(
            "load",
            f"ValueError: There is no module or parameter named '{name}' in {class_name}.",
            f"strip '{name}.' from the names of the tensors, as its trainer's export does",
        )
        for name in names
    }


def dropped_roots(*roots: str) -> Roots:
    """For SGLang, whose loaders skip what they have no parameter for."""
    return {
        root: Finding(
            "wrong",
            f"SGLang drops every tensor whose name begins with {root!r}",
            f"strip {root!r} from the names of the tensors, as its trainer's export does",
        )
        for root in roots
    }
