"""The recipe: frozen dataclasses whose fields are exactly the keys of a recipe file.

The schema knows formats and roles; it knows neither the names of a family nor how a layout packs.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from .algorithm import Algorithm
from .brief import Brief
from .decode import encode
from .expectations import Expectation, GateChoice, LoadsOn
from .formats import NUMBER_FORMATS, ActivationDtype, Granularity, NumberFormat, WeightDtype
from .kv_cache import KvCacheFormat
from .roles import SHARED_ROLES, Role

BackendName = Literal["torch", "quark", "modelopt"]
LayoutName = Literal["quark", "modelopt", "compressed-tensors", "fp8", "awq"]
StoredLayoutName = Literal[LayoutName, "gptq", "auto-round"]
"""Those besides that are only read: folders of other tools."""
Action = Literal["quantize", "keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a quantized weight is represented: w ≈ code * scale.

    `channel` keeps one scale per output row (channel axis 0), `tensor` one for the whole matrix,
    `group` one per `group_size` consecutive inputs of a row, `block` one per square of `group_size`
    rows and inputs. The scales of nvfp4 are FP8 under one float32 scale for the matrix; those of
    mxfp4 are powers of two.

    Attributes:
        scale_dtype: of INT4 scales; None = the dtype of the weight.
        carrier: in which wider format INT4 codes per channel are stored, each code exactly, under
            the same scales in float32: the arithmetic of INT4 in files that every engine loads.
        first_stage: what INT4 codes per channel are taken of: the weight rounded to FP8 under one
            scale for the matrix, w ≈ code * scale * matrix scale; None = the weight itself.
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
        """The format that layouts store and declare: the carrier's where there is one."""
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
        """True if a linear stores a scale of its input, or one over the groups of it."""
        a = self.activations
        return a is not None and (not a.dynamic or a.number.global_scale)

    @property
    def has_coarse_inputs(self) -> bool:
        """True if inputs are rounded to four bits, so that correcting weights for it pays.

        For FP8 inputs per token under INT4 weights it did not: the divergence of three drafts was
        5 % larger, 7 % smaller and 3 % larger.
        """
        return self.activations is not None and self.activations.number.bits < 8

    def __str__(self) -> str:
        return f"weights {self.weights}, activations {self.activations or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to the tensors of some roles, or of some tensor-name patterns.

    Attributes:
        action: drop: not stored, because the target has the very same tensor, byte for byte; that
            is proven before anything is written.
        format: in which they are quantized; None = as the recipe's `weights` and `activations` say.
    """

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
        return self._drop_problem() if self.action == "drop" else None

    def _drop_problem(self) -> str | None:
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
        name: how it is called. summary: what it does, in one line.
        loads_on: engines, GPUs and families for which the result loads; empty where no stock engine
            loads it.
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
        return self._format_problem()

    def _format_problem(self) -> str | None:
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
        """Of its linears: that of `weights` and `activations`, then those of rules."""
        of_rules = (rule.format for rule in self.rules if rule.format is not None)
        return tuple(dict.fromkeys((self._own_format, *of_rules)))

    def in_format(self, form: Format) -> "Recipe":
        """The recipe as it holds for linears of one of its formats, and of that one alone."""
        own = form == self._own_format
        return dataclasses.replace(
            self,
            weights=form.weights,
            activations=form.activations,
            algorithm=self.algorithm if own else self.algorithm.of(form.weights),
            rules=tuple(dataclasses.replace(r, format=None) if r.format else r for r in self.rules),
        )

    def of(self, rule: Rule) -> "Recipe":
        """The recipe as it holds for the tensors of one of its rules: `in_format` of theirs."""
        return self.in_format(rule.format or self._own_format)

    @property
    def stored(self) -> "Recipe":
        """The same recipe, of one format, with the weights as layouts store and declare them."""
        return dataclasses.replace(self, weights=self.weights.stored)

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
