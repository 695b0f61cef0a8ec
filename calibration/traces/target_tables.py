"""The embedding and the head of a target, for drafts that are stored without their own.

And its last norm, with which the head can be held against recorded features.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.safetensors_header import TensorInfo
from ...quantize.stored.loading import CPU
from ...quantize.stored.parts import FLOAT_DTYPES
from ...quantize.stored.stored_tables import StoredTables
from ...quantize.stored.table_names import EMBEDDING, HEAD

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "SharedTables", "TargetTables"]

FINAL_NORM = "target_norm.weight"
"""The target's last norm, [W]; not the name of any draft's tensor."""


class SharedTables(Mapping[str, Tensor]):
    """Tables by the names that drafts use; each is read when first asked for, once for all drafts.

    Args:
        readers: name -> what reads the table.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._readers[name]()
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTables:
    """Where the tables lie in a target's folder; both are [V, W]: vocabulary V, width W.

    Attributes:
        lm_head: that of the embedding where the target ties the two.
        norm: the weight [W] of the norm before the head; None where no tensor `norm.weight` is one.
    """

    checkpoint: Checkpoint
    embed_tokens: TensorInfo
    lm_head: TensorInfo
    norm: TensorInfo | None

    @classmethod
    def find(cls, target: Path) -> "TargetTables":
        """Find the tables by name, reading headers only: see `StoredTables.find`.

        Raises:
            CheckpointError: a table is absent, there are several, or they are no pair of tables.
        """
        tables = StoredTables.find(target)
        return cls(
            checkpoint=tables.checkpoint,
            embed_tokens=tables.embed_tokens,
            lm_head=tables.lm_head,
            norm=_final_norm(tables.checkpoint, tables.embed_tokens),
        )

    @property
    def vocab_size(self) -> int:
        """V, rows of both tables."""
        return self.embed_tokens.shape[0]

    @property
    def width(self) -> int:
        """W, elements of a row."""
        return self.embed_tokens.shape[1]

    def shared(
        self, dtype: torch.dtype | None = torch.float32, device: torch.device = CPU
    ) -> SharedTables:
        """Both tables, [V, W], for `load_draft`, and the norm where it is known.

        Args:
            dtype: of the tables; None = as the target stores them.
        """
        stored = {EMBEDDING: self.embed_tokens, HEAD: self.lm_head, FINAL_NORM: self.norm}
        return SharedTables(
            {
                name: partial(self._read, t, dtype, device)
                for name, t in stored.items()
                if t is not None
            }
        )

    def _read(self, tensor: TensorInfo, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        with safe_open(self.checkpoint.folder / tensor.file, "pt") as file:
            table: Tensor = file.get_tensor(tensor.name)
        return table.to(device, dtype)


def _final_norm(checkpoint: Checkpoint, embedding: TensorInfo) -> TensorInfo | None:
    """The tensor `norm.weight` that stands beside the embedding, if it is a vector of its width."""
    norm = checkpoint.tensors.get(embedding.name.removesuffix(EMBEDDING) + "norm.weight")
    fits = norm is not None and norm.dtype in FLOAT_DTYPES and norm.shape == embedding.shape[1:]
    return norm if fits else None
