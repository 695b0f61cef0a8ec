"""What an engine does with a draft, as data: the words in which the engine modules speak.

An engine's modules say, in tables, how its loader names modules, reads excludes and chooses a
scheme; a module of `versions` says which of them hold for one version. `walk.py` applies them to a
folder. What stands in no table is UNKNOWN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from .captured import Captures
from .declaration import Declaration
from .linear_scheme import LinearScheme

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
Arch = Literal["gfx942", "gfx950", "sm80", "sm90", "sm100"]
Verdict = Literal["LOADS", "LOADS BUT WRONG", "REFUSED", "UNKNOWN"]
Stage = Literal["config", "init", "load", "unknown", "wrong", "after load"]
Sharding = Literal["column", "row", "replicated"]

STAGES: tuple[Stage, ...] = ("config", "init", "load", "unknown", "wrong", "after load")
"""In the order in which they decide. What is unknown may be an error of loading, so it goes before
silent faults; a step after loading is reached by drafts that were loaded well only."""
VERDICTS: Mapping[Stage, Verdict] = {
    "config": "REFUSED",
    "init": "REFUSED",
    "load": "REFUSED",
    "unknown": "UNKNOWN",
    "wrong": "LOADS BUT WRONG",
    "after load": "REFUSED",
}

DFLASH_FAMILIES = frozenset({"dflash", "dflash2", "domino", "dspark"})
"""What engines load by their classes of DFlash, or by heirs of them."""
Biases = tuple[frozenset[str] | None, frozenset[str] | None]
"""Leaves of linears with a bias where attention_bias asks for it, and mlp_bias; None = unknown."""
_LIKE = {"gfx950": "gfx942"}
"""GPUs on which the same was executed, but for what has a row of its own."""


class Finding(NamedTuple):
    """One thing that an engine does not do as the folder means it.

    Attributes:
        stage: when; see `STAGES`.
        text: the engine's own error; of a silent fault or of what is unknown, what it is.
        remedy: what to do about it.
    """

    stage: Stage
    text: str
    remedy: str


class Scheme(NamedTuple):
    """Which class of the engine takes a declared scheme, and what comes of it if not.

    Attributes:
        name: of the class.
        problem: why it takes none of its linears.
        own_global_scales: its error after loading where the parts of a fused linear have global
            scales of their own; "" = it takes one of them without a word.
        whole_rows: it drops the scales of a linear whose rows are split by shards.
        not_read: suffixes of tensors that it does not miss.
    """

    name: str
    problem: Finding | None = None
    own_global_scales: str = ""
    whole_rows: bool = False
    not_read: tuple[str, ...] = ()


class Module(NamedTuple):
    """One linear as an engine builds it.

    Attributes:
        name: of its parameters, such as `model.layers.0.self_attn.qkv_proj`.
        prefix: the name that excludes are held against.
        parts: the canonical modules that fill it, in order.
        sharding: which side of the weight tensor parallelism cuts.
    """

    name: str
    prefix: str
    parts: tuple[str, ...]
    sharding: Sharding

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of an engine, besides the tensors.

    Attributes:
        family: name of the draft's family.
        config: the parsed config.json. tensor_names: of the folder.
        declaration: None where nothing is declared.
        has_side_file: whether there is an hf_quant_config.json.
        head_rows: of the stored lm_head; None where there is none.
        num_layers: of the draft. first_layer: its number among the target's and its own layers;
            None = not known.
        normed_heads: each head's query and key is normed, as in layers of Qwen3.
        fuses: it has fc; False where it reads the target's last hidden state.
    """

    family: str
    config: Mapping[str, Any]
    tensor_names: frozenset[str]
    declaration: Declaration | None
    has_side_file: bool
    head_rows: int | None
    num_layers: int
    first_layer: int | None
    normed_heads: bool
    fuses: bool
    arch: str
    tp: int

    @property
    def is_dflash(self) -> bool:
        """Whether engines load it as DFlash, with more tensors or not."""
        return self.family in DFLASH_FAMILIES

    @property
    def method(self) -> str | None:
        """The declared quant_method."""
        return self.declaration.method if self.declaration else None

    @property
    def signature(self) -> str:
        """The declared scheme as a key of the tables; "" where it is none, or not understood."""
        return (self.declaration.signature if self.declaration else None) or ""


class UnsureError(Exception):
    """An engine's rule says nothing certain here; the message says why."""


ExcludeRule = Callable[[Question, Module, tuple[str, ...]], bool | Finding]
"""(question, module, patterns) -> whether the module is excluded, or why the engine refuses the
patterns. Raises UnsureError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One version of an engine.

    A version that differs little from another is `replace(that.ENGINE, version=..., ...)`.

    Attributes:
        version: as the engine's package calls it. evidence: how its tables came about.
        archs: GPUs of which `check` wants one answer. other_archs: known besides; `gpus`: both.
        architectures: the names in config.json for which the loading was executed.
        architecture_problem: its error for a name that it does not have; None for those that it
            has, and for those of which nothing is known.
        plain_config: a config.json of any layout as the ordinary one that it takes it for, or why
            it refuses it.
        methods: every quant_method that it knows; another is refused with `unknown_method`.
        aliases: other spellings of a quant_method that it takes -> the usual one.
        other_keys: of config.json, where it looks for a declaration if there is no
            quantization_config.
        no_method: its error for a quantization_config without quant_method; None where it goes on
            as if there were none.
        taken: what it makes of a declaration on a GPU before it looks at any layer: the declaration
            as it understands it, None as if there were none, or why it refuses it.
        schemes: signature of a declaration -> arch, or "*" -> what becomes of it.
        modules: the linears of the draft. plain: leaves of modules that it never quantizes.
        plain_remedies: (family, leaf) -> what makes it take such a module for quantized after all.
        exclude_rules: quant_method -> its rule for excludes.
        config_problem: its rules for config.json, None = nothing to say.
        captures: the target's layers that it hands to a draft with this config.json.
        module_problem: its rules for one quantized module, stored in rows and columns.
        targets_on_disk: (quant_method, family) of drafts whose layers it finds by the names that
            the parts have on disk.
        no_target: quant_method -> its error for a module that no group of the declaration is
            meant for, with {prefix}; of others it takes it as floats.
        drops_unknown: what it does with a tensor that has no parameter: families for which it
            drops it silently; the others raise (`refuses_unknown`), or are unknown.
        casts: families for which it stores a float weight in FP8 without a word.
        refuses_casts: those for which it raises. dropped: family -> beginnings of names that it
            drops, though it refuses others.
        rooted: family -> root -> what it makes of tensors named ROOT.X; None = the same as of X.
        fc_norm_keys: of config.json, under which the norms before fc are asked for.
        old_norms: families for which it takes these norms under their older names.
        shares: families whose embedding and head are the target's always.
        later_norm: leaf of the norm that EAGLE-3's later layers use, of two that they load.
        embedding_rows: its error for an embedding of another vocabulary, with {rows} and {vocab}.
        null_base: its error for a rope_theta that is null. "" = not executed, as of all errors.
        uneven_heads: family -> its error for {heads} that are not whole in each of {tp} shards.
        biases: see `Biases`. reads_cache_scale: as such a scale, by its name; None = not executed.
        refuses_unwritten: families of which it refuses a draft that lacks a norm.
        absent_tables: canonical name of a table -> what it does where the draft has none.
        unshared_head: why a head that is not stored is not the target's either, but never written;
            None = it is the target's.
        absent_head: signature -> its error where there is no head, and it is not excluded.
        checks_shapes: it refuses a tensor that does not fit into its parameter.
        scale_shape: its error for scales [out] where it has [out, 1], or the other way round.
        launch: the command that serves a draft, given tokens per step and its folder, for a shell.
    """

    name: EngineName
    version: str
    evidence: str
    archs: tuple[str, ...]
    other_archs: tuple[str, ...] = ()
    architectures: frozenset[str]
    architecture_problem: Callable[[str], Finding | None] = lambda _name: None
    plain_config: Callable[[Mapping[str, Any]], Mapping[str, Any] | Finding] = lambda config: config
    methods: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[str, ...] = ()
    unknown_method: str
    no_method: str | None
    schemes: Mapping[str, Mapping[str, Scheme]]
    modules: Callable[[Question], tuple[Module, ...]]
    plain: Callable[[Question], frozenset[str]]
    plain_remedies: Mapping[tuple[str, str], str] = field(default_factory=dict)
    exclude_rules: Mapping[str, ExcludeRule]
    config_problem: Callable[[Question], Finding | None]
    captures: Callable[[Mapping[str, Any]], Captures] = lambda _config: ()
    module_problem: Callable[
        [Question, Module, LinearScheme, list[tuple[int, int]]], Finding | None
    ]
    targets_on_disk: frozenset[tuple[str, str]] = frozenset()
    no_target: Mapping[str, str] = field(default_factory=dict)
    taken: Callable[[Declaration, str], Declaration | Finding | None] = lambda said, _arch: said
    drops_unknown: frozenset[str] = frozenset()
    refuses_unknown: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    refuses_casts: frozenset[str] = frozenset()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rooted: Mapping[str, Mapping[str, Finding | None]] = field(default_factory=dict)
    fc_norm_keys: tuple[str, ...] = ("fc_norm",)
    old_norms: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()
    later_norm: str = ""
    embedding_rows: str = ""
    null_base: str = ""
    uneven_heads: Mapping[str, str] = field(default_factory=dict)
    biases: Callable[[Question], Biases] = lambda _question: (None, None)
    reads_cache_scale: Callable[[Question, str], bool | None] = lambda _question, _name: None
    refuses_unwritten: frozenset[str] = frozenset()
    absent_tables: Mapping[str, str] = field(default_factory=dict)
    unshared_head: Callable[[Question], Finding | None] = lambda _question: None
    absent_head: Mapping[str, str] = field(default_factory=dict)
    checks_shapes: bool = False
    scale_shape: str = ""
    launch: Callable[[Question, int, str], str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it is known on."""
        return (*self.archs, *self.other_archs)

    def as_read(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json as it looks for a declaration, under the usual key and quant_method."""
        keys = ("quantization_config", *self.other_keys)
        declared = next((config[key] for key in keys if config.get(key) is not None), None)
        if not isinstance(declared, Mapping):
            return config
        method = declared.get("quant_method")
        if isinstance(method, str) and method in self.aliases:
            declared = {**declared, "quant_method": self.aliases[method]}
        return {**config, "quantization_config": declared}

    def row(self, signature: str, arch: str) -> Scheme | None:
        """What becomes of a declared scheme; None where that is not known."""
        rows = self.schemes.get(signature, {})
        return rows.get(arch) or rows.get(_LIKE.get(arch, "")) or rows.get("*")

    def is_excluded(self, question: Question, module: Module) -> bool | Finding:
        """Whether it takes a module as floats by the declared excludes, or why it refuses them.

        Raises:
            UnsureError: that is not certain.
        """
        declared = question.declaration
        if declared is None or declared.layout is None:
            raise ValueError("no module is quantized without a scheme that is understood")
        return self.exclude_rules[declared.layout](question, module, declared.excludes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a linear in an engine.

    Attributes:
        name: after the module's, such as `weight_scale`.
        shape: in one tensor-parallel shard, after fusion.
        tensors: the stored tensors that fill it; empty = nothing does.
    """

    name: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What an engine does with one linear.

    Attributes:
        module: its name in the engine, after fusion.
        parameters: what the engine builds of it.
        scheme: the class that takes it; None where it is served as stored floats.
        quantized: whether the engine takes it as quantized.
    """

    module: str
    parameters: tuple[Parameter, ...]
    scheme: str | None
    quantized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """The answer of `check_draft`.

    Attributes:
        error: the engine's own text where it refuses, else what goes wrong or is unknown.
        remedy: what to do; None where the draft loads.
        layers: empty where the engine never gets to build them.
        launch: the command that serves the draft.
        findings: everything that was found, the deciding one first.
        captures: the target's layers that it hands to the draft, by its default runner first.
        notes: what another runner of it makes of the draft, as the verdict is the default one's;
            then what stands for tables that the draft has not.
    """

    engine: EngineName
    version: str
    arch: str | None
    tp: int
    verdict: Verdict
    evidence: str
    error: str | None = None
    remedy: str | None = None
    layers: tuple[Layer, ...] = ()
    launch: str | None = None
    findings: tuple[Finding, ...] = ()
    captures: Captures = ()
    notes: tuple[str, ...] = ()
