"""Tables beside a grafted layer in its own folder: they are the target's, which serves its own.

A head of a target that stores none is tied to its embedding. What the target stores quantized
cannot be compared byte for byte, and is not.
"""

from collections.abc import Iterator

from ..files.checkpoint import Checkpoint
from ..files.digests import tensor_digest
from ..files.safetensors_header import TensorInfo
from .verify_report import Fault

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def table_faults(target: Checkpoint, layer: Checkpoint, starts: tuple[str, ...]) -> Iterator[Fault]:
    """Those that are not the target's.

    Args:
        target: the folder without the layer.
    """
    for name, tensor in sorted(layer.tensors.items()):
        if name.startswith(starts) or not name.endswith((_EMBEDDING, _HEAD)):
            continue
        whole = target.tensors.get(name)
        if whole is None and name.endswith(_HEAD) and not _stores_a_head(target):
            whole = _embedding(target)
        if whole is None or whole.dtype != tensor.dtype:
            continue
        if whole.shape != tensor.shape or (
            tensor_digest(layer, tensor) != tensor_digest(target, whole)
        ):
            yield Fault(
                where=f"{name} of the layer's own folder",
                expected=f"the target's {whole.name}",
                got="another table, for which the layer was trained",
            )


def _stores_a_head(target: Checkpoint) -> bool:
    return any(".lm_head." in f".{name}" for name in target.tensors if ".layers." not in name)


def _embedding(target: Checkpoint) -> TensorInfo | None:
    found = [t for n, t in sorted(target.tensors.items()) if n.endswith(_EMBEDDING)]
    return next((tensor for tensor in found if ".layers." not in tensor.name), None)
