"""What a recipe expects of its result: what plans find, where it loads, which policy judges it."""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["release", "screening"]


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
class LoadsOn:
    """GPUs on which an engine loads what the recipe makes of drafts of these families.

    It is what `draftquant check` says of the result, with nothing changed by hand.
    """

    engine: Literal["vllm", "sglang", "tensorrt-llm"]
    arch: tuple[str, ...]
    family: tuple[str, ...]

    def problem(self) -> str | None:
        """What makes this say nothing, or None."""
        if not self.arch or not self.family:
            return "arch and family: expected at least one each"
        return None

    def __str__(self) -> str:
        return f"{self.engine} {' '.join(self.arch)} ({', '.join(self.family)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChoice:
    """Which release policy judges the result."""

    policy: PolicyName
