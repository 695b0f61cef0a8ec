"""Linears and norms of a draft by their names, as layers of several families run them."""

from abc import abstractmethod
from typing import Any, Protocol

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

from ..forward import DraftForward
from ..maths import linear, rms_norm


class Modules(Protocol):
    """The linears and norms of a draft, by canonical module name."""

    @abstractmethod
    def linear(self, name: str, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; `OnInput` sees the input first."""

    @abstractmethod
    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        """Its product alone: nothing observes or rounds the input."""

    @abstractmethod
    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm over the last axis, with the draft's own epsilon."""

    @abstractmethod
    def cached(self, prefix: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of keys and values: see `OnCache`.

        Args:
            prefix: of the attention's modules, "layers.N.self_attn.".
        """


class ModulesForward(DraftForward, Modules):
    """A draft over linears and norms by name; a bias is added where the draft has one."""

    geometry: Any

    @override
    def linear(self, name: str, x: Tensor) -> Tensor:
        product = self.kept_linear(name, self.on_input(name, x)).to(x.dtype)
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    @override
    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    @override
    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.geometry.rms_norm_eps)

    @override
    def cached(self, prefix: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.on_cache(int(prefix.split(".")[1]), keys, values)


def gated_mlp(prefix: str, x: Tensor, modules: Modules) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate, up = modules.linear(prefix + "gate_proj", x), modules.linear(prefix + "up_proj", x)
    return modules.linear(prefix + "down_proj", F.silu(gate) * up)
