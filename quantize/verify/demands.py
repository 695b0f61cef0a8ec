"""What is demanded of each linear: by what is declared for it, and by how its codes were found.

Linears of one folder may have several formats, and an algorithm treats each in its own way.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...recipes.formats import WeightDtype
from ...recipes.schema import Recipe
from ..drafts import Draft
from ..files.provenance import Method
from ..stored.declarations import DeclaredScheme
from ..stored.linear import INVERSE_SCALE
from .codes import Expected
from .method import recipe_of
from .record_faults import Record
from .rules import Rule, rule_of
from .scales import matrix_absmax


class Origin(NamedTuple):
    """How codes and scales were computed, where what is stored does not say it.

    Attributes:
        carried: number format of the codes, where a wider one carries them; else None.
        scale_dtype: safetensors dtype to which INT4 scales were rounded; None = the weight's.
        from_inverse: it was transcoded from a folder that stores the inverse of its global scale.
    """

    carried: WeightDtype | None
    scale_dtype: str | None
    from_inverse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Of one linear.

    Attributes:
        scheme: what is declared for it; None where nothing is.
        recipe: as it holds for it; None where another tool made the folder.
        rule: what its codes and scales are held to.
        origin: what they were before they were stored.
    """

    scheme: DeclaredScheme | None
    recipe: Recipe | None
    rule: Rule
    origin: Origin

    @property
    def scales_follow(self) -> bool:
        """True if it has a scale of the whole matrix that the source says exactly."""
        whole = self.scheme is not None and self.scheme.scales_whole_matrix
        return whole and self.rule.by_absmax


def demands_of(
    draft: Draft, scheme: DeclaredScheme | None, method: Method | None, recorded: Record | None
) -> dict[str, Demand]:
    """Of every matrix of the source, quantized or not, by on-disk module name.

    Raises:
        VerifyError: nothing is known of the recipe's algorithm.
    """
    found = {}
    for row in draft.linears():
        own = scheme.of(row.module) if scheme is not None else None
        used = None if method is None else replace(method, recipe=recipe_of(method, row))
        found[row.module] = Demand(
            scheme=own,
            recipe=used.recipe if used else None,
            rule=rule_of(used),
            origin=origin_of(row.module, own, used, recorded),
        )
    return found


def expected_codes(
    pool: ThreadPoolExecutor,
    draft: Draft,
    demands: Mapping[str, Demand],
    quantized: Collection[str],
    exponents: Mapping[str, int],
) -> dict[str, Expected]:
    """What is demanded of each quantized linear beside its own weight, by module.

    Where a scale of the whole matrix is demanded exactly, the source is read once before: codes and
    scales under it follow from it, also where only its rounded inverse is stored.

    Args:
        exponents: by tensor name, see `ChangedNorms`.
    """
    rows = {row.module: row.tensor for row in draft.linears() if row.module in quantized}
    expected = {
        module: Expected(
            rule=demands[module].rule,
            exponent=exponents.get(tensor.name, 0),
            carried=demands[module].origin.carried,
            scale_dtype=demands[module].origin.scale_dtype or tensor.dtype,
            from_inverse=demands[module].origin.from_inverse,
        )
        for module, tensor in rows.items()
    }
    whole = [module for module in rows if demands[module].scales_follow]
    found = pool.map(
        lambda module: matrix_absmax(draft.checkpoint, rows[module], expected[module].exponent),
        whole,
    )
    absmax = dict(zip(whole, found, strict=True))
    for group in (*draft.fused_groups(), *((module,) for module in whole)):
        members = tuple(module for module in group if module in absmax)
        for module in members:
            if expected[module].largest is None:
                largest = max(absmax[member] for member in members)
                expected[module] = replace(expected[module], largest=largest, group=members)
    return expected


def origin_of(
    module: str, scheme: DeclaredScheme | None, method: Method | None, recorded: Record | None
) -> Origin:
    """What the record of a folder says of this, or the recipe of the run that is writing it."""
    before = recorded.transcoded_from if recorded is not None else None
    weights = method.recipe.weights if method is not None else before.weights if before else None
    if weights is None:
        return Origin(None, None, from_inverse=False)
    carries = scheme is not None and scheme.weight_dtype != weights.dtype
    carried = weights.dtype if weights.carrier or (method is None and carries) else None
    scale_dtype = "F16" if weights.scale_dtype else None
    return Origin(
        carried=carried,
        scale_dtype=before.scale_dtype if before else scale_dtype,
        from_inverse=before is not None and f"{module}.{INVERSE_SCALE}" in before.digests,
    )
