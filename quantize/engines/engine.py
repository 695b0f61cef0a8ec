"""One version of an engine: a row of versions.toml, and the arithmetic of its rules.

Traits say what is peculiar to a family. What is in no table is UNKNOWN. Of an `Engine` it is known
how it reads config.json and a declaration, of a `BuildingEngine` also which linears it builds.
"""

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..drafts import FAMILIES
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import object_at
from ..drafts.engine_traits import AskedGpu, EngineTraits, Finding, InEngine
from ..drafts.recognition import is_speculators
from ..files.safetensors_header import TensorInfo
from .built_linears import built_as_floats, layer_linears, mtp_modules
from .contract import (
    TRY,
    Captures,
    EngineName,
    Module,
    Question,
    data_file,
)
from .declared_forms import Declaration
from .row_conditions import counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served with what; None = as the engine chooses, or not named.

    Attributes:
        draft: its folder or Hub id; None = its tensors are in the target's folder.
        target: its folder or Hub id, or a placeholder.
        context: number of positions that are served.
        cache_dtype: dtype of the draft's KV cache, in the engine's words.
        words: arguments of the target's own launch line, repeated unchanged.
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


TRAITS: tuple[EngineTraits, ...] = tuple(family.engine_traits for family in FAMILIES)
"""Facts of every family: for questions before the family of a draft is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(ABC):
    """One version of an engine; versions.toml explains its columns."""

    name: EngineName
    title: str
    version: str
    evidence: str
    archs: Sequence[str]
    command: Sequence[str]
    other_archs: Sequence[str] = ()
    checked_archs: Sequence[str] = ()
    launch_note: str | None = None
    unserved: Sequence[str] = ()
    fc_norm_keys: Sequence[str] = ("fc_norm",)
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_keys: Sequence[str] = ()
    experts_by_name: Sequence[str] = ()
    absent_tables: Mapping[str, str] = field(default_factory=dict)
    untried: str = TRY
    flags: Mapping[str, Sequence[str]]
    own_cache: tuple[str | None, str | None] = (None, None)

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
        """The names in config.json for which loading was executed."""
        return frozenset().union(*(self.own(traits).architectures for traits in TRAITS))

    def own(self, traits: EngineTraits) -> InEngine:
        """What a family's traits say about this engine."""
        in_engine: InEngine = getattr(traits, self.name.replace("-", "_"))
        return in_engine

    def rule(self, about: str, /, **facts: Any) -> Finding | None:
        """The finding of the first row of rules.toml that fits; None where no row does."""
        known = {"engine": self.title, **facts}
        for row in data_file("rules")[about]:
            if row.get("engine", self.name) == self.name and counts(row, known):
                stage, *texts = row["says"]
                text, remedy = (each.format_map(known) for each in (*texts, TRY)[:2])
                return Finding(stage, text, remedy)
        return None

    def rules(self, about: str, /, **facts: Any) -> Iterator[Finding]:
        """That finding, if there is one."""
        yield from filter(None, [self.rule(about, **facts)])

    def launch(self, question: Question, num_draft_tokens: int, serving: Serving) -> str:
        """The shell command that serves a draft with a number of tokens per step."""
        facts = {
            "tp": question.tp,
            "served_as": question.own.served_as,
            **asdict(serving),
            **self.launched(question, num_draft_tokens, serving),
        }
        words = {k: shlex.quote(str(fact)) for k, fact in facts.items() if fact is not None}
        named = ((part, re.findall(r"\{(\w+)\}", part)) for part in self.command)
        parts = (part.format_map(words) for part, names in named if words.keys() >= {*names})
        return " ".join([*serving.environment, *parts, *map(shlex.quote, serving.words)])

    @abstractmethod
    def launched(self, question: Question, tokens: int, serving: Serving) -> Mapping[str, object]:
        """What its command says otherwise or besides; None = the part that names it is left out."""

    # ---- config.json, before anything else

    def plain_config(self, config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
        """A config.json of any layout in the ordinary form that it is taken for, or the error."""
        return config

    def form_problem(self, config: Mapping[str, Any]) -> Finding | None:
        """Its error for a form of config.json, for any draft."""
        lacks_heads = "num_attention_heads" not in object_at(config, "text_config")
        return self.rule(
            "form",
            model_type=config.get("model_type"),
            has_section=config.get("speculators_config") is not None,
            of_speculators=is_speculators(config),
            lacks_heads="text_config" in config and lacks_heads,
            is_named=declared_architecture(config),
        )

    @abstractmethod
    def config_problem(self, question: Question) -> Finding | None:
        """What in config.json or the tensors' names keeps it from serving a draft."""

    # ---- a declared quantization

    def as_declared(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json as it searches it for a declaration, with the usual key and quant_method."""
        keys = ("quantization_config", *self.other_keys)
        declared = next((config[key] for key in keys if config.get(key) is not None), None)
        if not isinstance(declared, Mapping):
            return config
        method = declared.get("quant_method")
        if isinstance(method, str) and method in self.aliases:
            declared = {**declared, "quant_method": self.aliases[method]}
        return {**config, "quantization_config": declared}

    def taken(self, declaration: Declaration) -> Declaration | None:
        """A declaration as it understands it; None = as if there were none."""
        return declaration

    def declaration_problem(self, declaration: Declaration, gpu: AskedGpu) -> Finding | None:
        """Why it refuses a declaration on a GPU before it looks at any layer."""
        keys, method = declaration.keys, declaration.method or ""
        return self.rule(
            "declaration",
            method=method,
            gpu=gpu,
            algorithm=declaration.algorithm or "",
            is_nested=declaration.form != "flat" and declaration.by_modelopt,
            null_method=None in (keys.get("quant_method", ""), keys.get("quantization", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildingEngine(Engine):
    """An engine of which it is known which linears it builds."""

    @abstractmethod
    def captures(self, config: Mapping[str, Any]) -> Captures:
        """The target's layers that it passes to a draft, as config.json says or by default."""

    def is_excluded(self, question: Question, module: Module) -> bool:
        """Whether the declared excludes leave a module unquantized.

        Raises:
            UnsureError: the answer is not certain.
        """
        declared = question.declaration
        assert declared is not None
        assert declared.layout is not None
        if built_as_floats(question, module) is not None:
            return True
        return self.excludes(question, module, declared.layout, declared.excludes)

    @abstractmethod
    def excludes(
        self, question: Question, module: Module, layout: str, patterns: tuple[str, ...]
    ) -> bool:
        """Apply the rule of a layout. Raises UnsureError."""

    def modules(self, question: Question) -> tuple[Module, ...]:
        """Linears that may be quantized."""
        mtp = question.own.mtp
        if mtp is not None:
            return mtp_modules(question, mtp, self.name)
        layers = [
            Module(*self.layer_names(question, i, path), parts, sharding)
            for i in range(question.num_layers)
            for path, parts, sharding in layer_linears(question.traits, f"layers.{i}", self.name)
        ]
        own = question.own
        fc = [Module(own.fc, own.fc, ("fc",), own.fc_sharding)] if question.geometry.fuses else []
        return (*layers, *fc, *self.other_modules(question))

    @abstractmethod
    def layer_names(self, question: Question, layer: int, path: str) -> tuple[str, str]:
        """Names of a linear of a layer, by its path there: for its parameters, and for excludes."""

    @abstractmethod
    def other_modules(self, question: Question) -> Iterator[Module]:
        """The head and other linears outside the layers, but for fc."""

    @abstractmethod
    def plain(self, question: Question) -> frozenset[str]:
        """Leaves of modules that it never quantizes."""

    def plain_remedy(self, _question: Question, leaf: str) -> str:
        """What to do about a plain module of this leaf that is stored quantized."""
        return f"keep {leaf} in BF16: {self.title} never quantizes it"

    @abstractmethod
    def cache_scale(self, question: Question, tensor: TensorInfo) -> bool | None:
        """Whether it reads this scale of the KV cache; None = not executed."""
