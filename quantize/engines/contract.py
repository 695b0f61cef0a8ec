"""What an engine does with a draft, as data: the words and rows that engine modules use."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import override

from ...recipes.brief import Brief, counted, first_of
from ...recipes.packages import rows_beside
from ...recipes.schema import EngineName as EngineName
from ..drafts import Family
from ..drafts.engine_traits import (
    AskedGpu,
    EngineTraits,
    Finding,
    InEngine,
    ServedDraft,
    Sharding,
    Stage,
)
from ..drafts.family import TensorSpec
from ..files.safetensors_header import TensorInfo
from ..gpus import AMD
from .declared_forms import Declaration, Signature
from .row_conditions import holds

ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
Verdict = Literal["LOADS", "LOADS BUT WRONG", "REFUSED", "UNKNOWN"]
EXIT_CODES: Mapping[Verdict, int] = {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}

FROM_WORST: tuple[Verdict, ...] = ("REFUSED", "LOADS BUT WRONG", "UNKNOWN", "LOADS")
"""A certain fault decides what is said of one engine, the best what is said of several."""

TRY = "ask vLLM or SGLang itself (draftquant check DRAFT --ask), or try it in the server"
"""What to do about most of what is UNKNOWN."""
VERDICTS: Mapping[Stage, Verdict] = {
    "config": "REFUSED",
    "init": "REFUSED",
    "load": "REFUSED",
    "unknown": "UNKNOWN",
    "wrong": "LOADS BUT WRONG",
    "after load": "REFUSED",
}
"""Findings in the order in which they decide. An unknown may be an error of loading, so it precedes
silent faults; only drafts that loaded well reach a step after loading."""

UNKNOWN_FIRST_LAYER = 10**6
"""Placeholder for the target's number of layers in names, where it is not known."""
_NUMBER = re.compile(rf"\blayers\.({UNKNOWN_FIRST_LAYER // 100}\d\d)\b")


Captures = tuple[int, ...] | None
"""The target's layers whose inputs an engine hands to a draft; None = its default, if any."""


Linears = Mapping[str, str | None]
"""Names of linears as an engine builds them -> its class that takes each; None = unquantized."""


class Scheme(NamedTuple):
    """The class of the engine that takes a declared scheme: a row of schemes.toml."""

    name: str
    problem: Finding | None = None


class Module(NamedTuple):
    """One linear as an engine builds it, with the canonical modules that fill it, in order.

    Attributes:
        name: the name of its parameters, such as `model.layers.0.self_attn.qkv_proj`.
        prefix: the name that excludes are compared with.
    """

    name: str
    prefix: str
    parts: tuple[str, ...]
    sharding: Sharding

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def part_prefixes(self) -> tuple[str, ...]:
        """The names that excludes would use for the parts."""
        root = self.prefix.removesuffix(self.prefix.rpartition(".")[2])
        return tuple(root + part.rpartition(".")[2] for part in self.parts)


Stored = Mapping[str, Mapping[str, TensorInfo]]
"""Canonical module -> suffix -> tensor."""


@dataclass(frozen=True, kw_only=True)
class Question(ServedDraft):
    """One folder for one engine.

    Attributes:
        own: the family's traits for this engine.
        has_side_file: whether there is an hf_quant_config.json.
        first_layer: number of the draft's first among the target's and its own; None = not known.
    """

    family: Family
    own: InEngine
    declaration: Declaration | None
    has_side_file: bool
    first_layer: int | None

    @property
    def traits(self) -> EngineTraits:
        """What engines know of the family."""
        return self.family.engine_traits

    @property
    def inside_target(self) -> bool:
        """Whether it is a layer in the folder of its target, whose declaration is read."""
        return self.checkpoint.subtree is not None

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What the family expects of each canonical tensor name."""
        return self.family.tensor_specs(self.geometry)

    @cached_property
    def stored(self) -> Stored:
        """Its tensors by canonical names."""
        stored: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in self.checkpoint.tensors.items():
            module, _, suffix = self.family.canonical_name(name).rpartition(".")
            stored.setdefault(module, {})[suffix] = tensor
        return stored

    @property
    @override
    def head_rows(self) -> int | None:
        weight = self.stored.get("lm_head", {}).get("weight")
        return weight.shape[0] if weight and len(weight.shape) == 2 else None

    @property
    @override
    def method(self) -> str | None:
        return self.declaration.method if self.declaration else None

    @property
    def signature(self) -> Signature | None:
        """How every linear is stored; None if there is none, or several, or not understood."""
        return self.declaration.signature if self.declaration else None

    @property
    @override
    def is_nvfp4_of_modelopt(self) -> bool:
        known = vars(self.signature or Signature())
        return holds({"layout": "modelopt", "dtype": "nvfp4"}, known)

    def names_of_parts(self, module: Module) -> tuple[str, ...]:
        """Names of the parts of a fused linear by which a declaration may mean it; else none.

        A model's class passes its list of fused parts to its declaration, and a target's class to
        the one that its MTP layer is built under (`model_loader/utils.py:387` of vLLM 0.33.0,
        `loader.py:180` of SGLang 0.5.23). The declaration of a draft is read without that list.
        """
        mtp = self.own.mtp
        listed = self.traits.whole_model or (mtp is not None and mtp.lists_parts)
        return module.part_prefixes if listed and len(module.parts) > 1 else ()

    @property
    def is_tied(self) -> bool:
        """Whether config.json makes the embedding the head."""
        return self.config.get("tie_word_embeddings") is True

    @cached_property
    def is_latent(self) -> bool:
        """Whether its tensors are those of MLA, as in DeepSeek."""
        return any(".kv_b_proj." in name for name in self.tensor_names)

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of the declaration; none without one."""
        return self.declaration.keys if self.declaration else {}

    @property
    def is_float16_only(self) -> bool:
        """Whether SGLang takes it in float16 kernels, as it does AWQ without Marlin."""
        return self.method == "awq" and not self.is_marlin

    @property
    def is_marlin(self) -> bool:
        """Whether SGLang takes AutoAWQ's AWQ with zero points in Marlin, where GPUs have it."""
        symmetric = self.signature is not None and self.signature.says_symmetric
        zeros = self.method == "awq" and "bits" in self.keys and not symmetric
        return zeros and not self.gpu.is_one_of(AMD)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What rows of any subject may ask for."""
        return {
            "method": self.method,
            "gpu": self.gpu,
            "is_mla": self.is_latent,
            "is_tied": self.is_tied,
            "is_whole_model": self.traits.whole_model,
            "drafts_blocks": self.traits.drafts_blocks,
            "prunes_vocabulary": self.traits.prunes_vocabulary,
            "has_draft_vocab_size": self.config.get("draft_vocab_size") is not None,
        }

    @property
    def is_parallel(self) -> bool:
        """Whether all tokens of a verify step are drafted in one pass, as P-EAGLE does."""
        return any(name.endswith("mask_hidden") for name in self.tensor_names)


class UnsureError(Exception):
    """An engine's rule says nothing certain here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForm:
    """One form.

    Attributes:
        draft: its family; of an MTP layer the class of its target.
        layers: how many there are.
        linears: module -> the engine's class that takes it, or floats.
        others: every other fact, in words.
    """

    draft: str
    layers: int
    linears: Mapping[str, str]
    others: tuple[str, ...]

    @property
    def facts(self) -> Iterator[str]:
        """What has to be among the executed ones."""
        yield "one layer" if self.layers == 1 else "several layers"
        yield from (f"{module} as {taken}" for module, taken in self.linears.items())
        yield from self.others

    @property
    def in_words(self) -> str:
        """For people: what distinguishes it from others of its kind most."""
        by_class: dict[str, list[str]] = defaultdict(list)
        for module, taken in self.linears.items():
            by_class[taken].append(module)
        stored = "; ".join(f"{', '.join(names)} as {kind}" for kind, names in by_class.items())
        return f"{self.draft} with {counted(self.layers, 'layer')} and {stored or 'no linears'}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineCheck(Brief):
    """What one engine does with a draft.

    Attributes:
        engine: vllm, sglang or tensorrt-llm.
        version: the engine's version.
        arch: the GPU architecture, such as sm90; None = all known ones agree.
        tp: number of tensor-parallel shards.
        verdict: LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN.
        evidence: how this is known; "" where nothing was executed for this GPU.
        gpu: the GPUs that the answer is for, with their architectures, as the user calls them.
        error: why it does not load, in a sentence; where the engine refuses, its own text follows
            in brackets.
        remedy: what to do; None where the draft loads.
        linears: none where the engine stops before it builds them.
        launch: the command that serves the draft.
        launch_note: what a flag of that command does, where its name misleads.
        findings: everything that was found, the decisive finding first.
        captures: the target's layers that the engine passes to the draft, by its default runner.
        notes: what replaces tables that the draft does not have, and lints on what engines compute.
        form: what of the draft was compared with executed ones; None where no family read it.
        by_gpu: the verdict for each GPU, where no GPU was named and they differ; empty elsewhere.
    """

    engine: EngineName
    version: str
    arch: str | None
    gpu: str
    tp: int
    verdict: Verdict
    evidence: str
    error: str | None = None
    remedy: str | None = None
    linears: Linears = field(default_factory=dict)
    launch: str | None = None
    launch_note: str | None = None
    findings: tuple[Finding, ...] = ()
    captures: Captures = None
    notes: tuple[str, ...] = ()
    form: DraftForm | None = None
    by_gpu: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The engine and its version, as people write them."""
        return f"{TITLES[self.engine]} {self.version}"

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verdict": self.verdict,
            "engine": self.title,
            "GPU": self.gpu,
            "why": self.error,
            "remedy": self.remedy,
        }


def loading_places(checks: Sequence[EngineCheck]) -> str:
    """Where a draft loads; the first two places are named."""
    where = [f"{check.title} on {check.gpu}" for check in checks if check.verdict == "LOADS"]
    return first_of(where, 2)


def shown(text: str) -> str:
    """A text in which layers of unknown number are N, N+1 and so on."""
    first = UNKNOWN_FIRST_LAYER
    return _NUMBER.sub(lambda n: f"layers.N+{int(n[1]) - first}".removesuffix("+0"), text)


# ---- The rows of the data files beside this module: what engines do, as executed or read
# targets.toml has the models that pass hidden states of their layers to a draft, schemes.toml the
# classes that take a declared scheme, rules.toml what an engine says on a condition, meanings.toml
# what its errors mean, versions.toml what differs between versions. What no row says is unknown.

_RAW = re.compile(r"\w*(Error|Exception)\b")


def data_file(name: str) -> Mapping[str, Any]:
    """One of the data files beside this module."""
    return rows_beside(__file__, name)


TITLES: Mapping[EngineName, str] = {
    row["name"]: row["title"] for row in data_file("versions")["engine"]
}
"""How people write the names of engines."""


def taken_by(engine: EngineName, signature: Signature, gpu: AskedGpu) -> Scheme | None:
    """What happens to a declared scheme on a GPU; None where no row says it."""
    table = data_file("schemes")
    for row in table[engine].get(signature.layout, ()):
        if _is_meant(row, signature) and ("gpus" not in row or gpu.is_one_of(row["gpus"])):
            refused, problem = row.get("refused"), None
            if refused and ("refused_on" not in row or gpu.is_one_of(row["refused_on"])):
                stage, text, *remedy = table["refused"][engine][refused]
                problem = Finding(stage, text, *(remedy or [table["usual"][engine]]))
            return Scheme(row["class"], problem)
    return None


@cache
def concatenated(signature: Signature) -> str | None:
    """SGLang's error where it concatenates q_a and kv_a of MLA."""
    rows = data_file("schemes")["concatenated"].get(signature.layout, ())
    return next((row["error"] for row in rows if _is_meant(row, signature)), None)


def _is_meant(row: Mapping[str, Any], signature: Signature) -> bool:
    return any(holds(scheme, vars(signature)) for scheme in row["schemes"])


@cache
def meanings() -> Sequence[tuple[re.Pattern[str], str]]:
    """An error of an engine, and its meaning, with {engine}, {gpu} and the groups of the error."""
    return [(re.compile(error), means) for error, means in data_file("meanings").items()]


def is_raw(text: str) -> bool:
    """Whether a reason is a Python error, which tells its reader nothing."""
    return _RAW.match(text) is not None


def meaning(text: str, *, engine: str, gpu: object) -> str | None:
    """What an error of an engine means; None where no row says it."""
    for pattern, sentence in meanings():
        if match := pattern.search(text):
            return sentence.format(*match.groups(), engine=engine, gpu=gpu)
    return None


def explained(text: str, *, engine: str, gpu: object) -> str:
    """A reason as a person reads it: what it means, then the engine's own text in brackets."""
    if not is_raw(text):
        return text
    explanation = meaning(text, engine=engine, gpu=gpu) or f"{engine} ends with an error of its own"
    return f"{explanation} [{text}]"
