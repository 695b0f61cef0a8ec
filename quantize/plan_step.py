"""`Step`: one row of a plan, what happens to one tensor of the draft."""

from dataclasses import dataclass
from typing import Any, Literal

from .claims import NormAction
from .drafts.family import Row
from .files.safetensors_header import DTYPE_BYTES, StoredTensor

StepAction = Literal["quantize", "keep", "drop"] | NormAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to one tensor, and which rule said so.

    Attributes:
        action: "transform" is a kept tensor that changes in a known, exact way: the norm before the
            concat input, divided by the power of two that balances the halves (1 where they are).
            "learn": a norm whose weight learns with the codes.
        rule: index into the recipe's rules.
        stored: what the tensor becomes in the output; nothing where it is dropped.
    """

    row: Row
    action: StepAction
    rule: int
    stored: tuple[StoredTensor, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of the source tensor."""
        return self.row.tensor.nbytes

    @property
    def bytes_after(self) -> int:
        """Bytes of everything that it becomes."""
        return sum(tensor.nbytes for tensor in self.stored)

    def to_mapping(self, *, why: str | None, form: Any) -> dict[str, Any]:
        """The step as plain data: why its rule says so, and in which format it is quantized."""
        tensor = self.row.tensor
        return {
            "name": tensor.name,
            "role": self.row.role,
            "rule": self.rule,
            "action": self.action,
            "why": why,
            "format": form,
            "dtype": tensor.dtype,
            "bits": 8 * DTYPE_BYTES[tensor.dtype],
            "shape": list(tensor.shape),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "stored": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
                for t in self.stored
            ],
        }
