"""What codes and scales were before they were stored: carried by a wider format, or transcoded."""

from typing import NamedTuple

from ...recipes.formats import WeightDtype
from ..files.provenance import Method
from ..stored.declarations import DeclaredScheme
from .record_faults import Record


class Origin(NamedTuple):
    """How codes and scales were computed, where what is stored does not say it.

    Attributes:
        carried: number format of the codes, where a wider one carries them; else None.
        scale_dtype: safetensors dtype to which INT4 scales were rounded; None = the weight's.
    """

    carried: WeightDtype | None
    scale_dtype: str | None


def origin_of(
    scheme: DeclaredScheme | None, method: Method | None, recorded: Record | None
) -> Origin:
    """What the record of a folder says of this, or the recipe of the run that is writing it."""
    before = recorded.transcoded_from if recorded is not None else None
    weights = method.recipe.weights if method is not None else before.weights if before else None
    if weights is None:
        return Origin(None, None)
    carries = scheme is not None and scheme.weight_dtype != weights.dtype
    carried = weights.dtype if weights.carrier or (method is None and carries) else None
    scale_dtype = "F16" if weights.scale_dtype else None
    return Origin(carried, before.scale_dtype if before else scale_dtype)
