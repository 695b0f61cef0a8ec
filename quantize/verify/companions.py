"""The small tensors beside the codes and scales of a linear: zero points, shape, input scale."""

from collections.abc import Mapping

import numpy as np

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import read_whole, stored_scalar
from ..stored.parts import INPUT_SCALES, ZERO_POINTS
from .verify_report import Fault


def companion_faults(
    output: Checkpoint, tensor: TensorInfo, values: Mapping[str, TensorInfo]
) -> list[Fault]:
    """Zero points, stored shape and input scale of a linear; `values` by suffix."""
    faults = []
    for suffix in ("weight_zero_point", "weight_zero_point_2"):
        if suffix in values and read_whole(output, values[suffix]).any():
            where, got = values[suffix].name, "a non-zero zero point"
            faults.append(Fault(where=where, expected="all zero (symmetric)", got=got))
    if "qzeros" in values and (read_whole(output, values["qzeros"]) != ZERO_POINTS["qzeros"]).any():
        faults.append(Fault(where=values["qzeros"].name, expected="8 in every nibble (symmetric)",
                            got="another zero point"))  # fmt: skip
    if "weight_shape" in values:
        shape = read_whole(output, values["weight_shape"]).view(np.int64).tolist()
        if shape != list(tensor.shape):
            faults.append(Fault(where=values["weight_shape"].name, expected=str(list(tensor.shape)),
                                got=str(shape)))  # fmt: skip
    for suffix in INPUT_SCALES:
        if suffix in values:
            scale = stored_scalar(output, values[suffix])
            if not 0 < scale < float("inf"):
                where, expected = values[suffix].name, "a finite scale > 0"
                faults.append(Fault(where=where, expected=expected, got=str(scale)))
    return faults
