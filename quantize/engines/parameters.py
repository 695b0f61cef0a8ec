"""The parameters that an engine builds for one linear, after fusion, and what fills them.

Both engines name a parameter as its stored tensor, put the parts of a fused linear one below the
other, and hold what each part has once in one element per part: executed with vLLM 0.33.0 and
SGLang 0.5.23 (`tests/engines/run.py` compares every shape).
"""

from collections.abc import Mapping, Sequence

from ..files.safetensors_header import TensorInfo
from .contract import Module, Parameter
from .linear_scheme import LinearScheme

VOCAB_PADDING = 64
"""Rows of a head are filled up to a multiple of this before they are split."""


def parameters(
    module: Module,
    parts: Mapping[str, Mapping[str, TensorInfo]],
    shapes: Sequence[tuple[int, int]],
    scheme: LinearScheme | None,
    tp: int,
    *,
    biased: bool = False,
) -> tuple[Parameter, ...]:
    """Name and shape of each parameter in one shard, and the stored tensors that fill it.

    Args:
        module: the linear.
        parts: its canonical parts -> suffix -> stored tensor.
        shapes: rows and columns of each part in one shard.
        scheme: as which it is taken; None = as floats.
        tp: number of shards.
        biased: the linear has a bias, whatever its weight is.
    """
    rows, columns = sum(count for count, _ in shapes), shapes[0][1]
    if module.leaf == "lm_head":
        rows = -(-rows * tp // VOCAB_PADDING) * VOCAB_PADDING // tp
    expected: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
    if scheme is not None:
        expected = {
            suffix: part.shape if part.shape not in ((), (1,)) else (len(parts),)
            for suffix, part in scheme.parts(rows, columns).items()
        }
    if biased:
        expected["bias"] = (rows,)
    return tuple(
        Parameter(
            name=suffix,
            shape=shape,
            tensors=tuple(stored[suffix].name for stored in parts.values() if suffix in stored),
        )
        for suffix, shape in expected.items()
    )
