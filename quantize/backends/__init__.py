"""Backends: who computes codes and scales. Vendor toolkits are imported only when they run."""

from ...recipes.schema import Algorithm, BackendName
from ..errors import BackendError
from .base import ABSMAX_NEAREST, Backend


def get_backend(name: BackendName, algorithm: Algorithm = ABSMAX_NEAREST) -> Backend:
    """The backend of a recipe; constructing it imports no vendor toolkit.

    Raises:
        BackendError: the backend does not carry the algorithm.
    """
    if name == "torch":
        from .torch import TorchBackend

        return TorchBackend(algorithm)
    if (algorithm.scale, algorithm.rounding) != (ABSMAX_NEAREST.scale, ABSMAX_NEAREST.rounding):
        raise BackendError(
            f"backend {name}",
            f"carries {ABSMAX_NEAREST} only, got {algorithm}",
            fix="use 'backend: torch' (--backend torch), which carries every algorithm",
        )
    if name == "quark":
        from .quark import QuarkBackend

        return QuarkBackend()
    from .modelopt import ModelOptBackend

    return ModelOptBackend()


__all__ = ["ABSMAX_NEAREST", "Backend", "get_backend"]
