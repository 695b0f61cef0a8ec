"""Backends compute quantized values and scales. Vendor toolkits are imported only when they run."""

from ...recipes.errors import BackendError
from ...recipes.schema import Algorithm, BackendName
from ...recipes.schemes import refusal
from .backend import ABSMAX_NEAREST, Backend, TorchBackend


def get_backend(name: BackendName, algorithm: Algorithm = ABSMAX_NEAREST) -> Backend:
    """The backend of a recipe; constructing it imports no vendor toolkit."""
    refused = refusal(name, algorithm)
    if refused is not None:
        raise BackendError(f"backend {name}, {algorithm}", refused.reason, fix=refused.fix)
    if name == "torch":
        return TorchBackend(algorithm)
    if name == "quark":
        from .quark_backend import QuarkBackend

        return QuarkBackend(algorithm)
    from .modelopt_backend import ModelOptBackend

    return ModelOptBackend(algorithm)


__all__ = ["ABSMAX_NEAREST", "Backend", "get_backend"]
