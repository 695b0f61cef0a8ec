"""The recipe: frozen dataclasses whose fields are exactly the keys of a recipe file."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typing_extensions import override

from .brief import Brief
from .decode import AT_LEAST_1, encode
from .formats import (
    NUMBER_FORMATS,
    ActivationDtype,
    Granularity,
    KvCacheFormat,
    NumberFormat,
    WeightDtype,
)

Role = Literal[
    "attention", "mlp", "kv_up", "fusion", "embedding", "head", "norm", "vocabulary_map", "mask",
    "proposal", "correction", "router", "indexer", "other",
]  # fmt: skip
LAYER_ROLES: tuple[Role, ...] = ("attention", "mlp")
"""Linears of decoder layers: what `expect` counts."""
QUANTIZABLE: tuple[Role, ...] = (*LAYER_ROLES, "fusion", "head", "correction", "indexer")
"""What a rule may quantize; what is outside the layers only by explicit choice."""
SHARED_ROLES: tuple[Role, ...] = ("embedding", "head")
"""What a rule may drop: tables that engines take from the target where the draft has none."""


PolicyName = Literal["release", "screening"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the plan must find; otherwise nothing starts."""

    quantized_per_layer: Annotated[int, AT_LEAST_1]


EngineName = Literal["vllm", "sglang", "tensorrt-llm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsOn:
    """GPUs on which an engine loads the recipe's result for these families, as `check` predicts."""

    engine: EngineName
    arch: tuple[str, ...]
    family: tuple[str, ...]

    def problem(self) -> str | None:
        """What contradicts itself here, or None."""
        if not self.arch or not self.family:
            return "arch and family: expected at least one each"
        return None

    def __str__(self) -> str:
        return f"{self.engine} {' '.join(self.arch)} ({', '.join(self.family)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChoice:
    """Which release policy judges the result."""

    policy: PolicyName


ScaleChoice = Literal["absmax", "mse"]
RoundingChoice = Literal["nearest", "gptq", "learned"]
InputCorrection = Literal["auto", "off"]
NormChoice = Literal["kept", "learned"]
CORRECTED: Collection[RoundingChoice] = ("gptq", "learned")
"""Roundings that can correct weights for the rounding of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How scales are chosen and codes are rounded.

    Attributes:
        scale: absmax: the largest magnitude fits; mse: the smallest squared error of the weights,
            each weighted by the mean square of its inputs if `rounding` measures these; FP4 is
            not clipped. Where rounding is learned, scales start there.
        rounding: gptq: column by column, each making up for the errors of earlier ones on
            recorded inputs; learned: what brings the whole draft's output closest to that of the
            BF16 draft.
        balance_concat: auto: where the halves of EAGLE-3's concat input differ by 4 or more, the
            embedding's columns are multiplied by a power of two, and the preceding norm is
            divided.
        input_correction: auto: where inputs are rounded to four bits when served, GPTQ aims at the
            output of the weight for unrounded inputs, and learning starts there.
        norms: learned: the weights of the norms in front of quantized linears learn with the codes.
    """

    scale: ScaleChoice
    rounding: RoundingChoice
    balance_concat: Literal["auto", "off"] = "off"
    input_correction: InputCorrection = "off"
    norms: NormChoice = "kept"

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if self.norms == "learned" and self.rounding != "learned":
            return "norms: they learn with 'rounding: learned' alone: leave it out"
        if self.input_correction == "auto" and self.rounding not in CORRECTED:
            either = " or ".join(map(repr, CORRECTED))
            return (
                f"input_correction: leave it out: only rounding {either} measures"
                " what rounding the inputs changes"
            )
        return None

    def __str__(self) -> str:
        corrected = ", corrected for rounded inputs" if self.input_correction == "auto" else ""
        return f"scale {self.scale}, rounding {self.rounding}{corrected}"

    def of(self, weights: "WeightFormat") -> "Algorithm":
        """This algorithm for weights of one of several formats, without parts that cannot help."""
        searched = weights.granularity in ("channel", "group") and weights.first_stage is None
        fine = NUMBER_FORMATS[weights.dtype].bits >= 8
        if (self.scale == "mse" and not searched) or (self.rounding != "nearest" and fine):
            return self.rounded("nearest", scale="absmax")
        return self

    def rounded(self, rounding: RoundingChoice, *, scale: ScaleChoice | None = None) -> "Algorithm":
        """The same with another rounding, without settings that only the old rounding uses."""
        return dataclasses.replace(
            self,
            scale=scale or self.scale,
            rounding=rounding,
            input_correction=self.input_correction if rounding in CORRECTED else "off",
            norms=self.norms if rounding == "learned" else "kept",
        )

    @property
    def to_nearest(self) -> "Algorithm":
        """The same with nearest rounding, which looks at no inputs."""
        return self.rounded("nearest")

    @property
    def name(self) -> str:
        """Its name among `ALGORITHMS`, or else both of its parts."""
        pair = self.scale, self.rounding
        return next((n for n, known in ALGORITHMS.items() if known == pair), ", ".join(pair))


ALGORITHMS: Mapping[str, tuple[ScaleChoice, RoundingChoice]] = {
    "absmax": ("absmax", "nearest"),
    "mse": ("mse", "nearest"),
    "gptq": ("mse", "gptq"),
    "learned": ("mse", "learned"),
}
"""Scale and rounding that go together, by their name on the command line."""


BackendName = Literal["torch", "quark", "modelopt"]
LayoutName = Literal["quark", "modelopt", "compressed-tensors", "fp8", "awq"]
StoredLayoutName = Literal[LayoutName, "gptq", "auto-round"]
"""Also the layouts that are only read, in folders of other tools."""
Action = Literal["quantize", "keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a quantized weight is represented: w ≈ code * scale.

    `channel` keeps one scale per output row (channel axis 0), `tensor` one for the whole matrix,
    `group` one per `group_size` consecutive inputs of a row, `block` one per square of `group_size`
    rows and inputs. The scales of nvfp4 are FP8 under one float32 scale for the matrix; those of
    mxfp4 are powers of two.

    Attributes:
        scale_dtype: dtype of INT4 scales; None = the dtype of the weight.
        carrier: the wider format that stores INT4 codes per channel, each exactly, under the same
            scales in float32: the arithmetic of INT4 in files that every engine loads.
        first_stage: INT4 codes per channel are taken from the weight rounded to FP8 under one scale
            for the matrix, w ≈ code * scale * matrix scale; None = from the weight itself.
    """

    dtype: WeightDtype
    granularity: Granularity
    symmetric: bool
    group_size: int | None = None
    scale_dtype: Literal["float16"] | None = None
    first_stage: Literal["fp8_e4m3"] | None = None
    carrier: Literal["fp8_e4m3"] | None = None

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if not self.symmetric:
            return (
                "symmetric: expected true, because no layout here stores zero points. Groups of 32"
                " (group_size) or 'rounding: gptq' win back what one symmetric scale loses"
            )
        number = self.number
        if self.granularity not in number.sizes:
            return f"granularity: {self.dtype} needs {_either(number.sizes)}"
        sizes = number.sizes[self.granularity]
        if self.group_size not in (sizes or (None,)):
            wanted = _either(sizes) if sizes else "none"
            return f"group_size: {self.dtype} per {self.granularity} needs {wanted}"
        if self.scale_dtype and number.scale_dtype is not None:
            return f"scale_dtype: leave it out, because {self.dtype} has scales of one dtype only"
        if self.first_stage and self.granularity not in number.second_stage:
            return f"first_stage: leave it out: only int4 per channel has two stages, not {self}"
        if self.carrier and self.granularity not in number.carried:
            return f"carrier: leave it out: only int4 per channel fits a wider dtype, not {self}"
        if self.carrier and self.first_stage:
            return "carrier: values rounded in two stages do not fit a wider dtype: leave it out"
        if self.first_stage and self.scale_dtype:
            return "scale_dtype: leave it out, because the scales of two stages are float32"
        return None

    @property
    def number(self) -> NumberFormat:
        """The facts of its number format."""
        return NUMBER_FORMATS[self.dtype]

    @property
    def stored(self) -> "WeightFormat":
        """The format that layouts store and declare: the carrier's if there is one."""
        if self.carrier is None:
            return self
        return WeightFormat(dtype=self.carrier, granularity=self.granularity, symmetric=True)

    @property
    def scales_whole_matrix(self) -> bool:
        """True if a scale depends on the largest magnitude of the whole weight."""
        whole = self.granularity == "tensor" or self.number.global_scale
        return whole or bool(self.first_stage)

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.group_size else ""
        of = f" of {self.first_stage} per tensor" if self.first_stage else ""
        carried = f" stored as {self.carrier}" if self.carrier else ""
        return f"{self.dtype} per {self.granularity}{size}{of}{carried}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationFormat:
    """How the input of a quantized linear is rounded at run time.

    `token` computes one scale per token while serving; `tensor` is one stored, static scale;
    `group` computes one per 16 (nvfp4, under a stored global scale), 32 (mxfp4) or 128 (fp8_e4m3,
    with blocks of the weight) inputs of a token.
    """

    dtype: ActivationDtype
    granularity: Literal["token", "tensor", "group"]
    dynamic: bool

    @property
    def number(self) -> NumberFormat:
        """The facts of its number format."""
        return NUMBER_FORMATS[self.dtype]

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if self.number.only_groups and self.granularity != "group":
            return f"granularity: {self.dtype} activations need 'group'"
        if self.granularity == "tensor" and self.dynamic:
            return "dynamic: expected false, because activation scales per tensor are static here"
        if self.granularity != "tensor" and not self.dynamic:
            return f"dynamic: expected true: scales per {self.granularity} are computed at run time"
        return None

    def __str__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        over = " under one static scale" if self.number.global_scale else ""
        return f"{self.dtype} per {self.granularity}, {kind}{over}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a quantized linear is represented: its weight, and its input when served."""

    weights: WeightFormat
    activations: ActivationFormat | None

    @property
    def needs_input_scale(self) -> bool:
        """True if a linear stores a scale of its input, or one over the groups of its input."""
        a = self.activations
        return a is not None and (not a.dynamic or a.number.global_scale)

    @property
    def has_coarse_inputs(self) -> bool:
        """True if inputs are rounded to four bits: there correction pays; for FP8 it does not."""
        return self.activations is not None and self.activations.number.bits < 8

    def __str__(self) -> str:
        return f"weights {self.weights}, activations {self.activations or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to the tensors of some roles or patterns; `format` None = the recipe's own."""

    role: tuple[Role, ...] = ()
    tensor: tuple[str, ...] = ()
    action: Action
    format: Format | None = None
    why: str | None = None
    optional: bool = False

    def problem(self) -> str | None:
        """What makes this rule meaningless, or None."""
        if bool(self.role) == bool(self.tensor):
            return "expected exactly one of 'role' and 'tensor'"
        if self.action == "keep" and self.format is not None:
            return "format: leave it out, because a kept tensor is not quantized"
        if self.action == "keep" and not self.why:
            return "why: it is missing: a kept tensor costs bytes, so write down why it is kept"
        if self.action != "drop":
            return None
        others = [role for role in self.role if role not in SHARED_ROLES]
        if others:
            return f"role: engines do not take the {others[0]} of a draft from its target: keep it"
        if self.format is not None:
            return "format: leave it out, because a dropped tensor is not stored"
        if not self.why:
            return "why: it is missing: write down where engines get the dropped tensor from"
        return None

    def __str__(self) -> str:
        subject = f"role: {list(self.role)}" if self.role else f"tensor: {list(self.tensor)}"
        return f"{self.action} {subject}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recipe(Brief):
    """One way to quantize a draft, complete and resolved.

    Attributes:
        name: what it is called. summary: what it does, in one line.
        loads_on: engines and GPUs that load the result; empty where no stock engine loads it.
        backend: which library computes the quantized values. layout: how they are stored.
        weights: their format. activations: the inputs' format; None = weight only.
        kv_cache: the format of the draft's KV cache; None = its own dtype, and no scales.
        rules: what becomes of each tensor; every rule that is not `optional` must match one.
    """

    schema_version: Literal[1]
    name: str
    summary: str
    loads_on: tuple[LoadsOn, ...] = ()
    backend: BackendName
    layout: LayoutName
    weights: WeightFormat
    activations: ActivationFormat | None
    algorithm: Algorithm
    kv_cache: KvCacheFormat | None = None
    rules: tuple[Rule, ...]
    expect: Expectation
    gate: GateChoice

    def problem(self) -> str | None:
        """What makes the recipe as a whole impossible, or None."""
        if not any(rule.action == "quantize" for rule in self.rules):
            return "rules: no rule quantizes anything"
        claimed = [role for rule in self.rules for role in rule.role]
        twice = sorted({role for role in claimed if claimed.count(role) > 1})
        if twice:
            return f"rules: role {twice[0]!r} is claimed twice"
        for index, rule in enumerate(self.rules):
            if rule.format == self._own_format:
                return f"rules[{index}].format: leave it out, because it is the recipe's own"
        if all(rule.format for rule in self.rules if rule.action == "quantize"):
            return "weights: no rule uses it, because each has its own format: leave one format out"
        return None

    @property
    def _own_format(self) -> Format:
        return Format(weights=self.weights, activations=self.activations)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of its linears: that of `weights` and `activations`, then those of rules."""
        of_rules = (rule.format for rule in self.rules if rule.format is not None)
        return tuple(dict.fromkeys((self._own_format, *of_rules)))

    def in_format(self, form: Format) -> "Recipe":
        """The recipe as it holds for the linears of one of its formats, and only for these."""
        is_own = form == self._own_format
        return dataclasses.replace(
            self,
            weights=form.weights,
            activations=form.activations,
            algorithm=self.algorithm if is_own else self.algorithm.of(form.weights),
            rules=tuple(dataclasses.replace(r, format=None) if r.format else r for r in self.rules),
        )

    def of(self, rule: Rule) -> "Recipe":
        """The recipe as it holds for the tensors of one of its rules, in that rule's format."""
        return self.in_format(rule.format or self._own_format)

    @property
    def stored(self) -> "Recipe":
        """The same recipe, of one format, with the weights as layouts store and declare them."""
        return dataclasses.replace(self, weights=self.weights.stored)

    @property
    def is_for_the_plugin(self) -> bool:
        """Whether engines load its result with draftquant installed: see `quantize/plugins`."""
        weights, inputs = self.weights, self.activations
        stored = (weights.dtype, weights.granularity, weights.carrier, weights.first_stage)
        if (self.layout, *stored) != ("quark", "int4", "channel", None, None):
            return False
        return inputs is not None and inputs.dtype == "fp8_e4m3"

    @property
    def needs_input_scales(self) -> bool:
        """True if a quantized linear stores a scale of its input, or one over its groups."""
        return any(form.needs_input_scale for form in self.formats)

    @override
    def brief(self) -> Mapping[str, object]:
        return {key: getattr(self, key) for key in ("name", "summary", "backend", "layout")}


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain data: what `recipes show` prints and provenance stores."""
    mapping: dict[str, Any] = encode(recipe)
    return mapping


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of the resolved recipe: equal for two spellings of the same decisions."""
    text = json.dumps(to_mapping(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _either(values: Iterable[object]) -> str:
    return " or ".join(repr(value) for value in values)
