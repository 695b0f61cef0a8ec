"""Norms that balancing divided or that learned, and what draftquant.json may say of them.

A balanced norm is the source's / 2^k, exactly. One that learned lies near that, and as far from it
as it is recorded; what exactly it is the digests under the seal say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..drafts import Draft
from ..drafts.norms import MOST_OF_NORM, norms_before
from ..files.checkpoint import PROVENANCE_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest
from ..files.finiteness import Finiteness
from ..files.provenance import Method
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats, read_whole
from .verify_report import Compared, Fault, NotFinite, OnBytes

Doubles = npt.NDArray[np.float64]
_LARGEST_EXPONENT = 126  # 2^k and 2^-k are normal float32 numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedNorms:
    """What a run changed beside the linears.

    Attributes:
        exponents: tensor name -> k, of the norm that was divided by 2^k, and of the linears whose
            first half of columns was multiplied by it.
        factors: weight of a norm that learned -> the largest factor by which an element changed.
        faults: of what is recorded; nothing is taken for changed where it makes no sense.
    """

    exponents: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, method: Method, draft: Draft, quantized: Collection[str]) -> "ChangedNorms":
        """What is recorded.

        Args:
            method: of the run, or as recorded.
        """
        exponents, unbalanced = _balance_exponents(method, draft, quantized)
        factors, unlearned = _learned_factors(method, draft, quantized)
        return cls(exponents=exponents, factors=factors, faults=(*unbalanced, *unlearned))

    def changes(self, norm: TensorInfo) -> bool:
        """Whether a kept tensor may differ from the source's."""
        return norm.name in self.exponents or norm.name in self.factors

    def compare(
        self,
        source: Checkpoint,
        output: Checkpoint,
        norm: TensorInfo,
        on_bytes: OnBytes,
        algorithm: Algorithm = NEWEST,
    ) -> Compared:
        """The weight of a norm: every element exactly, its sign too, or within its factor.

        Float64 holds every quotient exactly, also of what is subnormal in float32.
        """
        a, b = read_whole(source, norm), read_whole(output, output.tensors[norm.name])
        on_bytes(a.size + b.size)
        before, after = (floats(block, norm.dtype).astype(np.float64) for block in (a, b))
        digests = Digest(algorithm), Digest(algorithm)
        finiteness = Finiteness(norm.dtype, norm.shape)
        finiteness.look(a)
        for digest, block in zip(digests, (a, b), strict=True):
            digest.update(block.data)
        factor, exponent = self.factors.get(norm.name), self.exponents.get(norm.name, 0)
        wanted = before * 2.0**-exponent
        if factor is not None:
            fault = _factor_fault(norm.name, wanted, after, factor)
        else:
            fault = _balance_fault(norm.name, before, wanted, after, exponent)
        return Compared(
            source_digests={norm.name: str(digests[0])},
            output_digests={norm.name: str(digests[1])},
            faults=NotFinite.of(norm.name, finiteness.problem) or ([fault] if fault else []),
        )


def _balance_fault(
    name: str, before: Doubles, wanted: Doubles, after: Doubles, exponent: int
) -> Fault | None:
    wrong = np.flatnonzero(wanted.view(np.uint64) != after.view(np.uint64))
    if not len(wrong):
        return None
    got = _others(wrong, before, after)
    return Fault(where=name, expected=f"the source's values / 2^{exponent}", got=got)


def _factor_fault(name: str, before: Doubles, after: Doubles, factor: float) -> Fault | None:
    """Every element keeps its sign and changes by the factor at most, and one by just that."""
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(np.abs(before), np.abs(after))
        factors = np.where(larger > 0, larger / np.minimum(np.abs(before), np.abs(after)), 1.0)
    right = (factors <= factor) & (np.signbit(before) == np.signbit(after))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        expected = f"the source's values times or divided by at most {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=_others(wrong, before, after))
    largest = float(factors.max(initial=1.0))
    if largest != factor:
        expected = f"a largest change by a factor of {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=f"{largest:.9g}")
    return None


def _others(wrong: npt.NDArray[np.intp], before: Doubles, after: Doubles) -> str:
    """How many elements are wrong, and the first of them."""
    first = int(wrong[0])
    return f"{len(wrong)} other(s), first {after[first]:g} for {before[first]:g} at {first}"


def _learned_factors(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, float], list[Fault]]:
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


def _balance_exponents(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, int], list[Fault]]:
    """What balancing the concat input changed: tensor name -> k, of the norm and the linears.

    The norm was divided by 2^k, the first half of the columns of each linear that reads it was
    multiplied. Nothing is taken for balanced unless all that is recorded makes sense.

    Args:
        method: of the run, or as recorded.
    """
    if not method.balanced:
        return {}, []
    where, got = f"{PROVENANCE_FILE}: balanced", str(dict(method.balanced))
    concat = draft.family.concat(draft.geometry)
    norm = draft.row(concat.norm) if concat is not None else None
    linears = draft.concat_linears()
    kept = [row.module for row in linears if row.module not in quantized]
    if method.recipe.algorithm.balance_concat == "off":
        expected = "none: the recipe says balance_concat: off"
    elif norm is None or not linears:
        expected = f"none: drafts of {draft.family.name} have no concat input"
    elif set(method.balanced) != {norm.tensor.name}:
        expected = f"{norm.tensor.name} alone"
    elif not 0 < abs(exponent := method.balanced[norm.tensor.name]) <= _LARGEST_EXPONENT:
        expected = f"a power of two between 1 and {_LARGEST_EXPONENT}, or the negative of one"
    elif kept:
        expected = f"none: {', '.join(kept)} read it and are kept"
    else:
        return dict.fromkeys((norm.tensor.name, *(r.tensor.name for r in linears)), exponent), []
    return {}, [Fault(where=where, expected=expected, got=got)]
