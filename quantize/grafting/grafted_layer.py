"""The layer that is grafted, as its own folder says it is: which of its linears are codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..stored.declarations import raw_declaration
from ..stored.stored_draft import StoredDraft
from .layer_names import LayerNames


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftedLayer:
    """What a declaration has to say of it.

    Attributes:
        declared: quantization_config of the layer's folder; None where no linear is quantized.
        names: under which its linears are asked for.
        quantized: modules on disk that are stored as codes.
        kept: modules on disk of the other matrices, tables among them.
        scheme: the same for people; None where no linear is quantized.
    """

    declared: Mapping[str, Any] | None
    names: LayerNames
    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    scheme: str | None

    @property
    def method(self) -> str | None:
        """The quant_method that it is declared by."""
        return None if self.declared is None else str(self.declared.get("quant_method"))

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Every name that one of its quantized linears is asked for by."""
        everywhere = (self.names.everywhere(module) for module in self.quantized)
        return tuple(dict.fromkeys(name for names in everywhere for name in names))


def grafted_layer(stored: StoredDraft, names: LayerNames) -> GraftedLayer:
    """Of a folder whose headers and declaration were read."""
    raw = raw_declaration(stored.checkpoint)
    rows = [row for row in stored.draft.rows if len(row.tensor.shape) == 2]
    quantized = tuple(sorted(stored.modules))
    return GraftedLayer(
        declared=raw.value if raw is not None and quantized else None,
        names=names,
        quantized=quantized,
        kept=tuple(row.module for row in rows if not stored.is_quantized(row)),
        scheme=_scheme(stored) if quantized else None,
    )


def _scheme(stored: StoredDraft) -> str:
    """Those of its own linears alone, of a declaration that may be that of a whole target."""
    found = (stored.scheme_of(row) for row in stored.draft.rows)
    return "; ".join(dict.fromkeys(str(scheme) for scheme in found if scheme is not None))
