"""What computes the codes of a weight: one interface for our numerics and the vendor toolkits."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

from ...recipes.errors import BackendError
from ...recipes.schema import Algorithm, BackendName, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from ..algorithms.algorithm import Absmax, Moments, Need
    from ..numerics.quantized_weight import QuantizedWeight

ABSMAX_NEAREST = Algorithm(scale="absmax", rounding="nearest")
"""What every backend runs, in every format that it computes."""


class Backend(ABC):
    """One way to compute codes and scales; takes whole weights unless it `streams_rows`."""

    name: BackendName
    streams_rows: bool = False
    needs: "Need"

    @abstractmethod
    def check(self, weights: WeightFormat) -> None:
        """Fail before any work if this backend cannot run here or cannot express the format."""

    def start(self) -> None:  # noqa: B027
        """Load the toolkit, if there is one, which takes seconds; otherwise `quantize` does it."""

    @abstractmethod
    def quantize(
        self,
        weight: "Tensor",
        weights: WeightFormat,
        absmax: "Absmax" = None,
        moments: "Moments" = None,
    ) -> "QuantizedWeight":
        """Quantize a weight, or a block of its rows if `streams_rows`; as `RowAlgorithm.quantize`.

        Raises:
            BackendError: the toolkit failed on this weight, or `absmax` makes no sense for it.
        """

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Package versions that the result depends on, for provenance."""


class TorchBackend(Backend):
    """Our own numerics: every algorithm, blocks of rows, and the oracle of the vendor backends."""

    name: BackendName = "torch"
    streams_rows = True

    def __init__(self, algorithm: Algorithm) -> None:
        from ..algorithms import get_algorithm

        self._choice = algorithm
        self._algorithm = get_algorithm(algorithm)
        self.needs = self._algorithm.needs

    @override
    def check(self, weights: WeightFormat) -> None:
        problem = self._algorithm.problem(weights)
        if problem is not None:
            where = f"algorithm: {self._choice}"
            raise BackendError(
                where,
                f"{problem}, got {weights}",
                fix="use 'scale: absmax' and 'rounding: nearest', or another format",
            )

    @override
    def quantize(
        self,
        weight: "Tensor",
        weights: WeightFormat,
        absmax: "Absmax" = None,
        moments: "Moments" = None,
    ) -> "QuantizedWeight":
        from ..algorithms import row_algorithm

        return row_algorithm(self._choice).quantize(weight, weights, absmax=absmax, moments=moments)

    @override
    def versions(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__}
