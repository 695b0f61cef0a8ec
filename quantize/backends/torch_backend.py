"""Our own numerics as a backend: every algorithm, blocks of rows, no vendor toolkit."""

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.errors import BackendError
from ...recipes.schema import Algorithm, BackendName, WeightFormat
from ..algorithms import InputMoments, get_algorithm, row_algorithm
from ..numerics.quantized_weight import QuantizedWeight
from .backend import ABSMAX_NEAREST, Backend


class TorchBackend(Backend):
    """The fast path and the independent oracle of the vendor backends."""

    name: BackendName = "torch"
    streams_rows = True

    def __init__(self, algorithm: Algorithm = ABSMAX_NEAREST) -> None:
        self._choice = algorithm
        self._algorithm = get_algorithm(algorithm)
        self.needs = self._algorithm.needs

    @override
    def check(self, weights: WeightFormat) -> None:
        problem = self._algorithm.problem(weights)
        if problem is not None:
            raise BackendError(
                f"algorithm: {self._choice}",
                f"{problem}, got {weights}",
                fix="use 'scale: absmax' and 'rounding: nearest', or another format",
            )

    @override
    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        absmax: Tensor | None = None,
        moments: InputMoments | None = None,
    ) -> QuantizedWeight:
        return row_algorithm(self._choice).quantize(weight, weights, absmax=absmax, moments=moments)

    @override
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}
