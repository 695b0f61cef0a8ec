"""The global scales of NVFP4, of which kernels take one for a whole fused linear."""

from collections.abc import Iterator, Mapping

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.decode import stored_scalar
from .contract import Finding, Module, Scheme

_SUFFIXES = ("weight_scale_2", "weight_global_scale")


def one_global_scale(
    checkpoint: Checkpoint,
    module: Module,
    parts: Mapping[str, Mapping[str, TensorInfo]],
    taken: Scheme,
) -> Iterator[Finding]:
    """What becomes of parts of a fused linear that have different ones; their values are read."""
    scales = [t for part in parts.values() for s, t in part.items() if s in _SUFFIXES]
    scales = [tensor for tensor in scales if (tensor.dtype, tensor.numel) == ("F32", 1)]
    if len({stored_scalar(checkpoint, tensor) for tensor in scales}) < 2:
        return
    remedy = "quantize the fused parts with one global scale"
    if taken.own_global_scales:
        yield Finding("after load", taken.own_global_scales, remedy)
    else:
        yield Finding("wrong", f"one scale for several: {module.name}", remedy)
