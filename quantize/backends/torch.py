"""Our own numerics as a backend: streams blocks of rows, needs no vendor toolkit."""

import torch
from torch import Tensor

from ...recipes.schema import BackendName, WeightFormat
from ..numerics import QuantizedWeight, fp8_codes, fp8_scale, int4_codes, int4_scale, row_absmax


class TorchBackend:
    """The fast path and the independent oracle of the vendor backends."""

    name: BackendName = "torch"
    streams_rows = True

    def check(self, weights: WeightFormat) -> None:
        """Every format of the schema is known here; see `Backend.check`."""

    def quantize(
        self, weight: Tensor, weights: WeightFormat, absmax: Tensor | None = None
    ) -> QuantizedWeight:
        """See `Backend.quantize`."""
        if weights.dtype == "int4":
            scale = int4_scale(weight)
            return QuantizedWeight(codes=int4_codes(weight, scale), scale=scale)
        rows = row_absmax(weight)
        if weights.granularity == "tensor":
            rows = rows.amax(dim=0, keepdim=True) if absmax is None else absmax
        scale = fp8_scale(rows)
        return QuantizedWeight(codes=fp8_codes(weight, scale), scale=scale)

    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        return {"torch": torch.__version__}
