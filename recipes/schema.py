"""The recipe: frozen dataclasses whose fields are exactly the keys of a recipe file.

The schema knows formats and roles; it knows neither the names of a family nor how a layout packs.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal[
    "attention",
    "mlp",
    "kv_up",
    "fusion",
    "embedding",
    "head",
    "norm",
    "vocabulary_map",
    "mask",
]
BackendName = Literal["torch", "quark", "modelopt"]
LayoutName = Literal["quark", "modelopt", "compressed-tensors"]
Action = Literal["quantize", "keep"]
PolicyName = Literal["release", "screening"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a quantized weight is represented: w ≈ code * scale.

    `channel` keeps one scale per output row (channel axis 0), `tensor` one for the whole matrix.
    """

    dtype: Literal["int4", "fp8_e4m3"]
    granularity: Literal["channel", "tensor"]
    symmetric: bool

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if not self.symmetric:
            return "symmetric: expected true: no shipped layout stores a non-zero zero point"
        if self.dtype == "int4" and self.granularity != "channel":
            return "granularity: int4 needs 'channel': one scale for a whole matrix loses the draft"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationFormat:
    """How the input of a quantized linear is rounded at run time.

    `token` computes one scale per token while serving; `tensor` is one stored, static scale.
    """

    dtype: Literal["fp8_e4m3"]
    granularity: Literal["token", "tensor"]
    dynamic: bool

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if self.granularity == "token" and not self.dynamic:
            return "dynamic: per-token scales exist only at run time: expected true"
        if self.granularity == "tensor" and self.dynamic:
            return "dynamic: per-tensor activation scales are static here: expected false"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How scales are chosen and codes are rounded."""

    scale: Literal["absmax"]
    rounding: Literal["nearest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to the tensors of some roles, or of some tensor-name patterns."""

    role: tuple[Role, ...] = ()
    tensor: tuple[str, ...] = ()
    action: Action
    why: str | None = None
    optional: bool = False

    def problem(self) -> str | None:
        """What makes this rule meaningless, or None."""
        if bool(self.role) == bool(self.tensor):
            return "expected exactly one of 'role' and 'tensor'"
        if self.action == "keep" and not self.why:
            return "why: a kept tensor costs bytes: say why it is kept"
        return None

    def __str__(self) -> str:
        subject = f"role: {list(self.role)}" if self.role else f"tensor: {list(self.tensor)}"
        return f"{self.action} {subject}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the plan must find, else nothing starts."""

    quantized_per_layer: int

    def problem(self) -> str | None:
        """What makes the expectation impossible, or None."""
        if self.quantized_per_layer < 1:
            return "quantized_per_layer: expected at least 1"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChoice:
    """Which release policy judges the result."""

    policy: PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to quantize a draft, complete and resolved.

    Attributes:
        loads_on: the hardware and engines on which the result loads, in one line.
        backend: who computes the codes. layout: how they are stored and declared.
        activations: None is a decision (weight only).
        rules: every tensor is claimed once, every rule that is not `optional` must match.
    """

    schema_version: Literal[1]
    name: str
    summary: str
    loads_on: str
    backend: BackendName
    layout: LayoutName
    weights: WeightFormat
    activations: ActivationFormat | None
    algorithm: Algorithm
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
        return None

    @property
    def needs_input_scales(self) -> bool:
        """True if every quantized linear stores a static activation scale."""
        return self.activations is not None and not self.activations.dynamic


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain data: what `recipes show` prints and provenance stores."""
    return {
        key: _plain(getattr(recipe, key)) for key in (f.name for f in dataclasses.fields(recipe))
    }


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of the resolved recipe: equal for two spellings of the same decisions."""
    text = json.dumps(to_mapping(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {
            f.name: _plain(item)
            for f, item in pairs
            if f.default is dataclasses.MISSING or item != f.default
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
