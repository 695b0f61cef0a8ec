"""Plain weights: the product code * scale, rounded to what a draft's weights are stored in."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files.safetensors_header import FloatDtype

Floats = npt.NDArray[np.float32]
_TORCH: dict[FloatDtype, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


def rounded(product: Floats, dtype: FloatDtype, name: str, first_row: int) -> Tensor:
    """Round to nearest, ties to even; neither the product nor the result may overflow.

    Args:
        product: [rows, in_features], code * scale in float32.
        name: of the weight, for the error.
        first_row: of the weight, where these rows begin.

    Raises:
        CheckpointError: names the row.
    """
    magnitude = np.maximum(product.max(axis=1), -product.min(axis=1))  # NaN where one is
    bad = np.flatnonzero(~_fits(magnitude, dtype))
    if not len(bad):
        return torch.from_numpy(product).to(_TORCH[dtype])
    row = int(bad[0])
    if np.isfinite(magnitude[row]):
        raise CheckpointError(
            name,
            f"row {first_row + row} holds values up to {magnitude[row]:g}, which {dtype}"
            " cannot hold",
            fix="use --dtype float32",
        )
    raise CheckpointError(
        name,
        f"row {first_row + row} decodes to NaN or infinity: a quantized value or a"
        " scale is damaged",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _fits(magnitude: Floats, dtype: FloatDtype) -> npt.NDArray[np.bool_]:
    """Whether values round to finite ones; rounding is monotonic, so the largest of a row tells."""
    fits: npt.NDArray[np.bool_] = torch.from_numpy(magnitude).to(_TORCH[dtype]).isfinite().numpy()
    return fits
