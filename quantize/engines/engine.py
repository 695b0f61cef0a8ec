"""One version of an engine, as data: what it reads, builds and loads.

What is peculiar to a family is asked of its traits. What stands in no table is UNKNOWN.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..drafts import FAMILIES
from ..drafts.engine_traits import Biases, EngineTraits, Finding, InEngine
from ..files.safetensors_header import TensorInfo
from .contract import TITLES, Captures, CutHead, Declaration, EngineName, Module, Question, Scheme
from .mtp_linears import built_as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served beside what; None = as the engine chooses, or not named.

    Attributes:
        draft: its folder or Hub id; None = its tensors lie in the target's folder.
        target: its folder or Hub id, or a word that stands for it.
        context: positions that are served.
        cache_dtype: of the draft's KV cache, in the engine's words.
        words: of the target's own launch line, that are repeated as they are.
        environment: variables that the command needs, such as NAME=1.
    """

    draft: str | None
    target: str = "TARGET"
    dtype: str | None = None
    context: int | None = None
    quantization: str | None = None
    target_cache_dtype: str | None = None
    cache_dtype: str | None = None
    words: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()

    def with_cache(self, declared: str | None) -> "Serving":
        """The same with the draft's KV cache as its folder declares it, unless another is asked."""
        return self if self.cache_dtype is not None else replace(self, cache_dtype=declared)

    def line(self, *parts: str) -> str:
        """A command for a shell: variables, the parts that are not empty, and the given words."""
        given = (shlex.quote(word) for word in self.words)
        return " ".join([*self.environment, *filter(None, parts), *given])


def flag(name: str, value: object) -> str:
    """A flag with its value; nothing where the value is None."""
    return "" if value is None else f"{name} {shlex.quote(str(value))}"


TRAITS: tuple[EngineTraits, ...] = tuple(family.engine_traits for family in FAMILIES)
"""Of every family: for what is asked before the family of a draft is known."""
_LIKE = {"gfx950": "gfx942"}
"""GPUs on which the same was executed, but for what has a row of its own."""
ExcludeRule = Callable[[Question, Module, tuple[str, ...]], bool | Finding]
"""(question, module, patterns) -> whether the module is excluded, or why the engine refuses the
patterns. Raises UnsureError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRules:
    """What an engine reads of config.json before anything else.

    Attributes:
        architectures: names for which the loading was executed, beside those that families tell.
        architecture_problem: its error for a name that it has not, whose remedy the tensors tell.
        plain: a config.json of any layout as the ordinary one that it takes it for, or why it
            refuses it.
        fc_norm_keys: under which the norms before fc are asked for.
        null_errors: key that is null -> its error; of sections, for drafts of blocks.
    """

    architectures: frozenset[str] = frozenset()
    architecture_problem: Callable[[Mapping[str, Any]], Finding | None] = lambda _config: None
    plain: Callable[[Mapping[str, Any]], Mapping[str, Any] | Finding] = lambda config: config
    problem: Callable[[Question], Finding | None]
    captures: Callable[[Question], Captures] = lambda _question: ()
    fc_norm_keys: tuple[str, ...] = ("fc_norm",)
    null_errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclarationRules:
    """How an engine reads a declared quantization.

    Attributes:
        methods: every quant_method that it knows; another is refused with `unknown_method`.
        aliases: other spellings of a quant_method that it takes -> the usual one.
        other_keys: of config.json, where it looks for a declaration if there is no
            quantization_config.
        no_method: its error for a quantization_config without quant_method; None where it goes on
            as if there were none.
        taken: what it makes of a declaration on a GPU before it looks at any layer: the declaration
            as it understands it, None as if there were none, or why it refuses it.
        schemes: signature of a declaration -> arch, or "*" -> what becomes of it.
        exclude_rules: quant_method -> its rule for excludes.
        experts_by_name: each quant_method of which float experts are excluded by all their names.
        no_target: quant_method -> its error for a module that no group of the declaration is
            meant for, with {prefix}; of others it takes it as floats.
    """

    methods: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_keys: tuple[str, ...] = ()
    unknown_method: str = ""
    no_method: str | None = None
    taken: Callable[[Declaration, str], Declaration | Finding | None] = lambda said, _arch: said
    schemes: Callable[[], Mapping[str, Mapping[str, Scheme]]]
    exclude_rules: Mapping[str, ExcludeRule]
    experts_by_name: frozenset[str] = frozenset()
    no_target: Mapping[str, str] = field(default_factory=dict)

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
        rows = self.schemes().get(signature, {})
        return rows.get(arch) or rows.get(_LIKE.get(arch, "")) or rows.get("*")

    def is_excluded(self, question: Question, module: Module) -> bool | Finding:
        """Whether it takes a module as floats by the declared excludes, or why it refuses them.

        Raises:
            UnsureError: that is not certain.
        """
        declared = question.declaration
        if declared is None or declared.layout is None:
            raise ValueError("no module is quantized without a scheme that is understood")
        if built_as_floats(question, module) is not None:
            return True
        return self.exclude_rules[declared.layout](question, module, declared.excludes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRules:
    """Which linears an engine builds, and what its kernels ask of them.

    Attributes:
        plain: leaves of modules that it never quantizes.
        plain_remedy: what makes it take a plain module of this leaf for quantized after all.
        stored: its error for quantized values of a module that it takes as floats, where the other
            rules do not say it.
    """

    modules: Callable[[Question], tuple[Module, ...]]
    plain: Callable[[Question], frozenset[str]]
    plain_remedy: Callable[[Question, str], str | None] = lambda _question, _leaf: None
    stored: Callable[[Question, Module], Finding | None] = lambda _question, _module: None
    biases: Callable[[Question], Biases] = lambda _question: (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRules:
    """What an engine makes of tensors that fill no linear, or do not fit.

    Attributes:
        cache_scale: whether it reads such a scale, or why it refuses it; None = not executed.
        stranger: its error for a tensor of a linear that has no such parameter, where it has one of
            its own.
        later_norm: leaf of the norm that EAGLE-3's later layers use, of two that they load.
        embedding_rows: its error for an embedding of another vocabulary, with {rows} and {vocab}.
        absent_tables: canonical name of a table -> what it does where the draft has none.
        unshared_head: why a head that is not stored is not the target's either, but never written;
            None = it is the target's.
        absent_head: signature -> its error where there is no head, and it is not excluded.
        scale_shape: its error for scales [out] where it has [out, 1], or the other way round.
    """

    cache_scale: Callable[[Question, TensorInfo], bool | Finding | None] = lambda *_asked: None
    stranger: Callable[[Question, str], str | None] = lambda _question, _name: None
    later_norm: str = ""
    embedding_rows: str = ""
    absent_tables: Mapping[str, str] = field(default_factory=dict)
    unshared_head: Callable[[Question], Finding | None] = lambda _question: None
    absent_head: Mapping[str, str] = field(default_factory=dict)
    cut_head: Callable[[Question, CutHead], Iterable[Finding]] = lambda _question, _head: ()
    checks_shapes: bool = False
    scale_shape: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One version of an engine.

    Attributes:
        version: as the engine's package calls it. evidence: how its tables came about.
        archs: GPUs of which `check` wants one answer. other_archs: known besides; `gpus`: both.
        checked_archs: on which folders of other tools were executed, and no recipe's: `check`
            answers for them (`tests/engines/foreign_mix.py`), and no recipe promises them.
        launch: the command that serves a draft, given tokens per step, for a shell.
        launch_note: what a flag of every such command does, where its name misleads.
    """

    name: EngineName
    version: str
    evidence: str
    archs: tuple[str, ...]
    other_archs: tuple[str, ...] = ()
    checked_archs: tuple[str, ...] = ()
    own: Callable[[EngineTraits], InEngine]
    config: ConfigRules
    declaration: DeclarationRules
    linears: LinearRules
    tensors: TensorRules
    launch: Callable[[Question, int, Serving], str]
    launch_note: str | None = None

    @property
    def title(self) -> str:
        """Its name, as people write it."""
        return TITLES[self.name]

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it is known on."""
        return (*self.archs, *self.other_archs)

    @property
    def checked_gpus(self) -> tuple[str, ...]:
        """All GPUs that `check` answers for."""
        return (*self.gpus, *self.checked_archs)

    @property
    def architectures(self) -> frozenset[str]:
        """The names in config.json for which the loading was executed."""
        of_families = (self.own(traits).architectures for traits in TRAITS)
        return self.config.architectures.union(*of_families)
