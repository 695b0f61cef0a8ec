"""Stored scales against those of the rule, bit for bit; and the small tensors beside them."""

from collections.abc import Mapping

import numpy as np

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import Floats, floats, read_rows, read_whole, stored_scalar
from ..stored.linear import INVERSE_SCALE, matrix_scale, stored_scales
from ..stored.parts import INPUT_SCALES, scale_suffix
from .rules import ScaleRule
from .scales_by_absmax import (
    absmax_scales,
    searched_shares,
    share_of_scales,
    whole_scale,
    whole_steps,
)
from .verify_report import Fault, blocks_of

_BLOCK = 2**21  # bytes
_SCALES = 2**16  # those of small groups are a sixteenth as many as weights: a few at a time


def matrix_absmax(source: Checkpoint, tensor: TensorInfo, exponent: int) -> np.float32:
    """Largest magnitude of a weight whose first half of columns counts 2^exponent times.

    Magnitudes sort like their bit patterns, NaN above infinity; integers are compared faster.
    """
    rows, columns = tensor.shape
    kind = np.uint32 if tensor.dtype == "F32" else np.uint16
    largest = np.zeros(2, kind)
    per_block = max(1, _BLOCK // max(1, columns * DTYPE_BYTES[tensor.dtype]))
    for block in blocks_of(rows, per_block):
        bits = read_rows(source, tensor, block.start, block.stop).view(kind).reshape(-1, columns)
        magnitudes = np.bitwise_and(bits, np.iinfo(kind).max >> 1, out=bits)
        halves = magnitudes[:, : columns // 2], magnitudes[:, columns // 2 :]
        largest = np.maximum(largest, [half.max(initial=0) for half in halves]).astype(kind)
    first, second = floats(largest.view(np.uint8), tensor.dtype)
    return np.float32(max(np.ldexp(first, exponent), second))


def as_stored(scale: np.float32, tensor: TensorInfo, *, from_inverse: bool = False) -> np.float32:
    """The number that stands for the scale of a matrix: compressed-tensors' NVFP4 divides by it.

    Engines multiply by the inverse of what is stored there, which may differ from `scale` in the
    last digit. A folder transcoded from that layout (`from_inverse`) stores what they multiply by.
    """
    inverse = np.float32(1) / scale
    if tensor.name.endswith(INVERSE_SCALE):
        return inverse
    return np.float32(1) / inverse if from_inverse else scale


def whole_scale_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    largest: np.float32,
    group: tuple[str, ...],
    *,
    from_inverse: bool,
) -> list[Fault]:
    """The one scale of a matrix is that of the largest magnitude of a fused group, bit for bit."""
    tensor = matrix_scale(output, module)
    wanted = as_stored(whole_scale(scheme, largest), tensor, from_inverse=from_inverse)
    stored = stored_scalar(output, tensor)
    if stored == wanted:
        return []
    of = f" of {', '.join(group)}" if len(group) > 1 else ""
    inverse = ", inverse" if tensor.name.endswith(INVERSE_SCALE) else ""
    inverse = ", inverse of the inverse" if from_inverse and not inverse else inverse
    expected = f"absmax{of} / {whole_steps(scheme):g}{inverse} ({wanted:.9g})"
    return [Fault(where=tensor.name, expected=expected, got=f"{stored:.9g}")]


def scale_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    absmax: Floats,
    whole: np.float32 | None,
    rule: ScaleRule,
    *,
    dtype: str | None = None,
) -> list[Fault]:
    """Scales of rows, groups or blocks that the largest magnitudes do not give.

    Args:
        scheme: what it declares; scales of whole matrices are `whole_scale_faults`.
        absmax: [out_features, groups] of the source weight.
        whole: the scale of the matrix over them, else None.
        rule: "absmax": exactly these. "searched": between the ends of a search.
        dtype: to which they were rounded; None = that in which they are stored.
    """
    tensor = output.tensors[f"{module}.{scale_suffix(scheme)}"]
    stored = stored_scales(output, scheme, module)
    size = scheme.group_size or 1 if scheme.granularity == "block" else 1
    count, first = 0, None
    for rows in blocks_of(len(stored), max(1, _SCALES // max(1, stored.shape[1]))):
        own = absmax[rows.start * size : rows.stop * size]
        largest = np.maximum.reduceat(own, np.arange(0, len(own), size), axis=0)
        some = stored[rows.start : rows.stop]
        with np.errstate(all="ignore"):  # what is not finite equals nothing, or is a fault before
            wanted = absmax_scales(largest, scheme, dtype or tensor.dtype, whole)
            wrong = some != wanted
            if rule == "searched":
                least, most = (
                    share_of_scales(share, largest, scheme, dtype or tensor.dtype, whole)
                    for share in searched_shares(scheme)
                )
                wrong = ~((some >= least) & (some <= most))
        if wrong.any() and first is None:
            row, group = map(int, np.argwhere(wrong)[0])
            first = rows.start + row, some[row, group], wanted[row, group]
        count += int(np.count_nonzero(wrong))
    if first is None:
        return []
    row, got_scale, wanted_scale = first
    says = f"{_words(scheme)} ({wanted_scale:.9g})"
    expected = says if rule == "absmax" else "{} to {} of ".format(*searched_shares(scheme)) + says
    got = f"{count} other(s), first {got_scale:.9g} at row {row * size}"
    return [Fault(where=tensor.name, expected=expected, got=got)]


def _words(scheme: DeclaredScheme) -> str:
    if scheme.first_stage:
        return "absmax of the FP8 values / 7.5"
    number = scheme.number
    if number.powers_of_two:
        return "2^(floor(log2(absmax)) - 2), rounded"
    steps = number.largest + (0.5 if number.is_integer else 0)
    return f"absmax / ({steps:g} * global scale)" if number.global_scale else f"absmax / {steps:g}"


def companion_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    tensor: TensorInfo,
    values: Mapping[str, TensorInfo],
    *,
    symmetric: bool,
) -> list[Fault]:
    """Zero points, stored shape and input scale of a linear.

    Args:
        values: the stored tensors of the linear, by suffix.
        symmetric: codes count from the middle of their range, also where others could be stored.
    """
    faults = []
    constant = symmetric or not scheme.layout.zeros(scheme)
    for suffix, byte in scheme.layout.zero_points.items() if constant else ():
        if suffix in values and (read_whole(output, values[suffix]) != byte).any():
            what = f"{byte & 15} in every nibble" if byte else "all zero"
            got = "another zero point" if byte else "a non-zero zero point"
            where = values[suffix].name
            faults.append(Fault(where=where, expected=f"{what} (symmetric)", got=got))
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
