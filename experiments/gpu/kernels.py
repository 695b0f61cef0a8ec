"""Linears as engines hold them, over the kernels that PyTorch ships: BF16, FP8, INT4."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
GROUP = 128
INNER_TILES = 8


class Kernel(ABC):
    """One linear, its weight as the kernel wants it.

    Attributes:
        tolerance: of the outputs' relative error against a product of the widened values in BF16.
    """

    tolerance = 0.02

    @abstractmethod
    def widened(self) -> Tensor:
        """[out, in] float32: the values that stand for the weight."""

    @abstractmethod
    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What is read of an input [batch, in] bfloat16; what this takes is not timed."""

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Tensor:
        """[batch, out] bfloat16."""


class Bf16(Kernel):
    """`F.linear`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @override
    def widened(self) -> Tensor:
        return self._weight.float()

    @override
    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    @override
    def __call__(self, *inputs: Tensor) -> Tensor:
        return F.linear(inputs[0], self._weight)


class Fp8(Kernel):
    """`torch._scaled_mm`, scales per tensor or per row."""

    rowwise = False
    tolerance = 0.06  # inputs are rounded too

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._scale = self._rounded(weight)

    @override
    def widened(self) -> Tensor:
        return self._weight.float() * self._scale

    @override
    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._rounded(x)

    @override
    def __call__(self, *inputs: Tensor) -> Tensor:
        x, scale = inputs
        if self.rowwise and x.device.type == "cpu":  # has no such kernel: the code alone is tried
            return ((x.float() * scale) @ self.widened().T).bfloat16()
        scale_shape = (1, -1) if self.rowwise else ()
        return torch._scaled_mm(
            x, self._weight.T, scale_a=scale, scale_b=self._scale.reshape(scale_shape),
            out_dtype=torch.bfloat16,
        )  # fmt: skip

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        largest = wide.abs().amax(1, keepdim=True) if self.rowwise else wide.abs().amax()
        scale = largest.clamp(min=1e-12) / FP8_MAX
        return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


class Fp8Rowwise(Fp8):
    """A scale for each output and each token."""

    rowwise = True


class Int4(Kernel):
    """`torch._weight_int4pack_mm`: INT4 in groups of 128, inputs in BF16."""

    def __init__(self, weight: Tensor) -> None:
        groups = weight.float().view(len(weight), -1, GROUP)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7.5
        scale = scale.bfloat16().float()
        codes = (groups / scale).round_().clamp_(-8, 7)
        self._widened_parts = codes.to(torch.int8), scale
        codes = (codes + 8).to(torch.int32).flatten(1)
        self._scale_and_zero = torch.cat((scale, torch.zeros_like(scale)), dim=-1)
        self._scale_and_zero = self._scale_and_zero.transpose(0, 1).contiguous().bfloat16()
        if weight.device.type == "cpu":
            self._packed = torch._convert_weight_to_int4pack_for_cpu(codes, INNER_TILES)
        else:
            bytes_ = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            self._packed = torch._convert_weight_to_int4pack(bytes_, INNER_TILES)

    @override
    def widened(self) -> Tensor:
        codes, scale = self._widened_parts
        return (codes.float() * scale).flatten(1)

    @override
    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    @override
    def __call__(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        product = (
            torch._weight_int4pack_mm_for_cpu
            if x.device.type == "cpu"
            else torch._weight_int4pack_mm
        )
        return product(x, self._packed, GROUP, self._scale_and_zero)


KERNELS: dict[str, type[Kernel]] = {
    "BF16": Bf16, "FP8 per tensor": Fp8, "FP8 per row": Fp8Rowwise, "INT4 group 128": Int4,
}  # fmt: skip


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted; NaN is infinite."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return error if error == error else float("inf")
