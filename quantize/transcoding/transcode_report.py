"""`TranscodeReport`: what transcoding a folder did."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...recipes.brief import Brief, megabytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TranscodeReport(Brief):
    """A quantized draft, stored in another layout or dtype.

    Attributes:
        out: the folder that was written.
        before: what the source declares.
        after: what the new folder declares.
        linears: number of quantized linears.
        kept: number of tensors that were copied byte for byte.
        bytes_before: bytes of the tensors of the source.
        bytes_after: bytes of the tensors that were written.
    """

    out: Path
    before: str
    after: str
    linears: int
    kept: int
    bytes_before: int
    bytes_after: int

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "out": self.out,
            "from": self.before,
            "to": self.after,
            "linears": self.linears,
            "size": f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)}",
        }
