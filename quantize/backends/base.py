"""What computes the codes: one protocol for our torch numerics and the vendor toolkits.

A backend sees one weight (or a block of its rows) and gives codes and scales, by the algorithm that
it was made for. It never sees embeddings, heads or files, and it never stores anything: layouts and
the writer do.
"""

from typing import Protocol

from torch import Tensor

from ...recipes.schema import Algorithm, BackendName, WeightFormat
from ..algorithms import InputMoments, Need
from ..numerics.quantized_weight import QuantizedWeight

ABSMAX_NEAREST = Algorithm(scale="absmax", rounding="nearest")
"""What every backend carries, in every format that it computes."""


class Backend(Protocol):
    """One way to compute codes and scales."""

    name: BackendName
    streams_rows: bool
    """True if blocks of rows may be quantized one by one; False if the whole weight is needed."""
    needs: Need
    """What must be measured of a linear's inputs; see `Algorithm.needs`."""

    def check(self, weights: WeightFormat) -> None:
        """Fail before any work if this backend cannot run here or cannot express the format.

        Raises:
            BackendError: the toolkit is missing or unusable, or does not know the format, or its
                algorithm does not.
        """

    def start(self) -> None:
        """Load the toolkit, which takes seconds; `quantize` does so unasked.

        Raises:
            BackendError: it cannot be loaded.
        """

    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        absmax: Tensor | None = None,
        moments: InputMoments | None = None,
    ) -> QuantizedWeight:
        """Quantize a weight, or a block of its rows if `streams_rows`.

        Args:
            weight: [rows, in_features] bfloat16, float16 or float32, finite.
            weights: the recipe's format.
            absmax: [1, 1] float32, largest magnitude that a scale of the *whole* matrix must cover
                (`WeightFormat.scales_whole_matrix`): that of the weight, of which `weight` may be
                a block, and of those that engines fuse with it. None = that of `weight`.
            moments: see `Algorithm.quantize`.

        Raises:
            BackendError: the toolkit failed on this weight, or `absmax` makes no sense for it.
        """

    def versions(self) -> dict[str, str]:
        """Package versions that the result depends on, for provenance."""
