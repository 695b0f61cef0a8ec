"""Backends: who computes codes and scales. Vendor toolkits are imported only when they run."""

from ...recipes.schema import BackendName
from .base import Backend


def get_backend(name: BackendName) -> Backend:
    """The backend of a recipe; constructing it imports no vendor toolkit."""
    if name == "quark":
        from .quark import QuarkBackend

        return QuarkBackend()
    if name == "modelopt":
        from .modelopt import ModelOptBackend

        return ModelOptBackend()
    from .torch import TorchBackend

    return TorchBackend()


__all__ = ["Backend", "get_backend"]
