"""How a model rotates positions, and for how many it is made, as engines derive it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import short
from ..drafts.rope import DEFAULT_THETA
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE

_MOST = 2**40
"""Of a factor, of a base and of positions: more is no model's, and their products stay finite."""

_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds whose max_position_embeddings holds the factor: vLLM `config/model.py:2613`."""
_SIZES_CACHE_ONLY = ("default", "linear", "llama3", "ntk", "proportional")
"""Kinds in which max_position_embeddings is the length of a table: vLLM
`config/speculative.py:104`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rope of one config.

    Attributes:
        kind: rope_type; "default" = plain.
        theta: its base.
        factor: of the scaling; 1 = none.
        positions: that the config says; None = it does not say.
        originally: positions before a scaling that names them; None = not said.
    """

    kind: str
    theta: float
    factor: float
    positions: int | None
    originally: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any], where: Path | str = CONFIG_FILE) -> "Rotation":
        """By the keys of transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling).

        Args:
            where: it stands, for errors.

        Raises:
            CheckpointError: a number is none that positions can be rotated by.
        """
        modern = _object(config.get("rope_parameters"))
        scaling = _object(config.get("rope_scaling")) or modern
        kind = scaling.get("rope_type", scaling.get("type"))
        longest = config.get("max_position_embeddings")
        return cls(
            kind=kind if isinstance(kind, str) else "default",
            theta=_number(
                modern.get("rope_theta", config.get("rope_theta")), DEFAULT_THETA, where, "theta"
            ),
            factor=_number(scaling.get("factor"), 1.0, where, "scaling factor"),
            positions=_positions(longest, where),
            originally=_whole(scaling.get("original_max_position_embeddings")),
        )

    @property
    def in_vllm(self) -> int | None:
        """Positions that vLLM derives: `_get_and_verify_max_len`, `config/model.py:2546`."""
        if self.positions is None:
            return None
        return int(self.positions * (1.0 if self.kind in _ALREADY_SCALED else self.factor))

    @property
    def in_sglang(self) -> int | None:
        """Positions that SGLang derives: `get_context_length`, `hf_transformers/common.py:677`."""
        if self.positions is None:
            return None
        scaled = self.originally is None and self.kind != "llama3"
        return int(self.positions * (self.factor if scaled else 1.0))

    @property
    def only_sizes_a_table(self) -> bool:
        """Whether more positions leave every angle as it is."""
        return self.kind in _SIZES_CACHE_ONLY

    @property
    def in_words(self) -> str:
        """The base, and the scaling if there is one."""
        scaled = "" if self.kind == "default" else f", {self.kind} scaling by {self.factor:g}"
        return f"theta {self.theta:,.0f}{scaled}"


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object, default: float, where: Path | str, what: str) -> float:
    """A positive number; the default where none is said, or one that engines take for none."""
    if not isinstance(value, int | float) or value <= 0:
        return default
    if not value <= _MOST:  # NaN too
        raise CheckpointError(
            where,
            f"rope {what}: expected a number up to 2^40, got {short(value)}",
            fix="give the config.json that the model came with",
        )
    return float(value)


def _positions(value: object, where: Path | str) -> int | None:
    if type(value) is not int or value < 1:
        return None
    if value > _MOST:
        raise CheckpointError(
            where,
            f"max_position_embeddings: expected a number up to 2^40, got {short(value)}",
            fix="give the config.json that the model came with",
        )
    return value


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
