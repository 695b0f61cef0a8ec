"""Our own numerics as a backend: every algorithm, blocks of rows, no vendor toolkit."""

import torch
from torch import Tensor

from ...recipes.schema import Algorithm, BackendName, WeightFormat
from ..algorithms import InputMoments, get_algorithm
from ..errors import BackendError
from ..numerics.quantized_weight import QuantizedWeight
from .base import ABSMAX_NEAREST


class TorchBackend:
    """The fast path and the independent oracle of the vendor backends."""

    name: BackendName = "torch"
    streams_rows = True

    def __init__(self, algorithm: Algorithm = ABSMAX_NEAREST) -> None:
        self._choice = algorithm
        self._algorithm = get_algorithm(algorithm)
        self.needs = self._algorithm.needs

    def check(self, weights: WeightFormat) -> None:
        """Fail unless the algorithm knows the format; see `Backend.check`."""
        problem = self._algorithm.problem(weights)
        if problem is not None:
            raise BackendError(
                f"algorithm: {self._choice}",
                f"{problem}, got {weights}",
                fix="use 'scale: absmax' and 'rounding: nearest', or another format",
            )

    def start(self) -> None:
        """See `Backend.start`: there is nothing to load."""

    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        absmax: Tensor | None = None,
        moments: InputMoments | None = None,
    ) -> QuantizedWeight:
        """See `Backend.quantize`."""
        return self._algorithm.quantize(weight, weights, absmax=absmax, moments=moments)

    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        return {"torch": torch.__version__}
