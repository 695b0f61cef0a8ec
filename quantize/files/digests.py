"""Digests, which identify the bytes of tensors.

They use BLAKE3, which takes a fifth of the time of SHA-256, and begin with its name.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from blake3 import blake3

from .checkpoint import Checkpoint, byte_blocks
from .safetensors_header import WORKERS, TensorInfo


class Digest:
    """A digest in the making; records hold its `str`."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        self._hash.update(data)

    def copy(self) -> "Digest":
        """A digest that starts with the same bytes."""
        other = Digest()
        other._hash = self._hash.copy()
        return other

    def __str__(self) -> str:
        return f"blake3:{self._hash.hexdigest()}"


def tensor_digest(
    checkpoint: Checkpoint,
    tensor: TensorInfo,
    on_block: Callable[[memoryview], None] = lambda _block: None,
) -> str:
    """Digest of a tensor's bytes, which are read block by block; `on_block` sees each."""
    digest = Digest()
    for block in byte_blocks(checkpoint, tensor):
        digest.update(block)
        on_block(block)
    return str(digest)


def tensor_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digest of every tensor, by name."""
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = pool.map(partial(tensor_digest, checkpoint), checkpoint.tensors.values())
        return dict(zip(checkpoint.tensors, digests, strict=True))


def tensors_sha256(digests: Mapping[str, str]) -> str:
    """Identity of the weights of a folder: a hash over names and digests of all its tensors."""
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
