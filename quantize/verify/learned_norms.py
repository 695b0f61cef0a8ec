"""Norms that learned with the codes: the digests under the seal say what they are, and the source
how far they may be from it."""

from collections.abc import Collection

import numpy as np

from ..drafts import Draft
from ..drafts.norms import MOST_OF_NORM, norms_before
from ..files.checkpoint import PROVENANCE_FILE
from ..files.provenance import Method
from ..stored.decoded_numbers import Floats
from .verify_report import Fault


def learned_factors(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, float], list[Fault]]:
    """Weight of a norm that learned -> the largest factor by which an element may have changed.

    No norm is taken for learned unless all that is recorded makes sense.

    Args:
        method: of the run, or as recorded.
        draft: the source.
        quantized: on-disk names of the modules that are stored quantized.
    """
    where, expected = f"{PROVENANCE_FILE}: learned_norms", "none: the recipe keeps them"
    found, wanted = dict(method.learned_norms), set[str]()
    if method.recipe.algorithm.norms == "learned":
        wanted = {row.tensor.name for row in norms_before(draft, quantized)}
        expected = ", ".join(sorted(wanted)) or "none: no quantized linear has a norm of its own"
    if found.keys() != wanted:
        got = ", ".join(sorted(found)) or "none"
        return {}, [Fault(where=where, expected=expected, got=got)]
    if not all(1 <= factor <= MOST_OF_NORM for factor in found.values()):
        expected = f"factors from 1 to {MOST_OF_NORM:g}"
        return {}, [Fault(where=where, expected=expected, got=str(found))]
    return found, []


def factor_fault(name: str, before: Floats, after: Floats, factor: float) -> Fault | None:
    """Every element keeps its sign and changes by the recorded factor at most, and one does.

    Args:
        name: of the norm's weight.
        before: [width] float64, the source's, balanced as it is recorded. after: what is stored.
        factor: as recorded.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(np.abs(before), np.abs(after))
        factors = np.where(larger > 0, larger / np.minimum(np.abs(before), np.abs(after)), 1.0)
    right = (factors <= factor) & (np.signbit(before) == np.signbit(after))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        first = int(wrong[0])
        got = f"{len(wrong)} other(s), first {after[first]:g} for {before[first]:g} at {first}"
        expected = f"the source's values times or divided by at most {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=got)
    largest = float(factors.max(initial=1.0))
    if largest != factor:
        expected = f"a largest change by a factor of {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=f"{largest:.9g}")
    return None
