"""The embedding and the head of a target, for drafts that are stored without their own.

Also its last norm, with which the head can be compared with recorded features. A trace folder may
carry them, so that such drafts need no target:

    tables.safetensors   "token_ids"     I32 [n], ascending: every token of the traces, and what
                                         else was asked for (the mask token of a DFlash draft)
                         "embed_tokens"  [n, W], the embeddings of these tokens
                         "lm_head"       [V, W], the whole head; the embedding in a tied target
                         "norm"          [W], the norm before the head, where it is known

W is the target's width, V its vocabulary; tables are stored as the target stores them, byte for
byte. Replay feeds a draft only the recorded tokens and its mask token, so no other row of
the embedding is ever read.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...quantize.files.checkpoint import Checkpoint, open_weights, pread_exactly
from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import StoredTensor, TensorInfo
from ...quantize.stored.layouts.scheme import FLOAT_DTYPES
from ...quantize.stored.loading import CPU
from ...quantize.stored.stored_tables import EMBEDDING, HEAD, StoredTables
from ...recipes.errors import TraceError
from .manifest import TablesFile

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "SharedTables", "TargetTables"]

FINAL_NORM = "target_norm.weight"  # the target's last norm, [W]; no draft has a tensor of this name


class SharedTables(Mapping[str, Tensor]):
    """Tables by the names that drafts use, each read at its first use, once for all drafts."""

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
    """Where the tables are in a target's folder; both are [V, W]: vocabulary V, width W.

    `norm` is the weight [W] of the norm before the head; None where no `norm.weight` is one.
    """

    checkpoint: Checkpoint
    embed_tokens: TensorInfo
    lm_head: TensorInfo
    norm: TensorInfo | None

    @classmethod
    def find(cls, target: Path) -> "TargetTables":
        """Find the tables by name, reading headers only."""
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
        """Both tables [V, W] and the norm, for `load_draft`; None = in the dtype of the target."""
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
    """The tensor `norm.weight` beside the embedding, if it is a vector of its width."""
    norm = checkpoint.tensors.get(embedding.name.removesuffix(EMBEDDING) + "norm.weight")
    fits = norm is not None and norm.dtype in FLOAT_DTYPES and norm.shape == embedding.shape[1:]
    return norm if fits else None


TensorTable = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> safetensors dtype and shape
ANY_LENGTH = -1  # in a shape: an axis that no other fact determines


def expected_tensors(tables: TablesFile, vocab_size: int) -> TensorTable:
    """What tables.safetensors holds according to trace.json."""
    count, width = tables.num_token_ids, tables.width
    norm: TensorTable = {"norm": (tables.norm_dtype, (width,))} if tables.norm_dtype else {}
    return norm | {
        "token_ids": ("I32", (count,)),
        "embed_tokens": (tables.embed_tokens_dtype, (count, width)),
        "lm_head": (tables.lm_head_dtype, (vocab_size, width)),
    }


def write_tables(path: Path, tables: TargetTables, token_ids: Sequence[int]) -> None:
    """Copy what the traces need from a target's tables into a new file; ids ascend in [0, V)."""
    embedding, head, norm = tables.embed_tokens, tables.lm_head, tables.norm
    stored = [
        StoredTensor(name=name, dtype=dtype, shape=shape)
        for name, dtype, shape in (
            ("token_ids", "I32", (len(token_ids),)),
            ("embed_tokens", embedding.dtype, (len(token_ids), tables.width)),
            ("lm_head", head.dtype, head.shape),
            *([("norm", norm.dtype, norm.shape)] if norm else []),
        )
    ]
    row = torch.empty(embedding.nbytes // tables.vocab_size, dtype=torch.uint8)
    with SafetensorsFile(path, stored, {}) as file:
        file.write("token_ids", torch.tensor(token_ids, dtype=torch.int32))
        source = tables.checkpoint.folder / embedding.file
        with open_weights(source) as descriptor:
            for i, token in enumerate(token_ids):
                start = embedding.start + token * len(row)
                pread_exactly(descriptor, row.numpy().data, start, source)
                file.write("embed_tokens", row, offset=i * len(row))
        for name, whole in (("lm_head", head), ("norm", norm)):
            if whole is not None:
                with open_weights(tables.checkpoint.folder / whole.file) as descriptor:
                    file.copy(descriptor, dataclasses.replace(whole, name=name))


def shared_tables(
    opened: Callable[[], Any],
    listed: TablesFile,
    vocab_size: int,
    where: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> SharedTables:
    """The carried tables under the names that drafts use; None = in the dtype as stored.

    The embedding is [V, W]; rows not carried are NaN. Reading a table raises TraceError if the
    file contradicts itself.
    """

    def embedding() -> Tensor:
        token_ids = opened().get_tensor("token_ids").to(torch.int64)
        ascends = bool((token_ids[1:] > token_ids[:-1]).all())
        if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or not ascends:
            raise TraceError(where, f"token_ids: expected ascending ids in [0, {vocab_size})",
                             fix="record the traces again")  # fmt: skip
        rows = _finite(opened().get_tensor("embed_tokens"), "embed_tokens", where)
        shape, given = (vocab_size, rows.shape[1]), dtype or rows.dtype
        table = torch.full(shape, torch.nan, dtype=given, device=device)
        table[token_ids.to(device)] = rows.to(device, given)
        return table

    def whole(name: str) -> Tensor:
        return _finite(opened().get_tensor(name), name, where).to(device, dtype)

    readers: dict[str, Callable[[], Tensor]] = {
        EMBEDDING: embedding,
        HEAD: partial(whole, "lm_head"),
    }
    if listed.norm_dtype:
        readers[FINAL_NORM] = partial(whole, "norm")
    return SharedTables(readers)


def _finite(table: Tensor, name: str, where: Path) -> Tensor:
    if not bool(torch.isfinite(torch.stack(table.aminmax())).all()):
        raise TraceError(where, f"{name} contains NaN or infinity",
                         fix="give a target whose tables are finite, and record again")  # fmt: skip
    return table
