"""The embedding and the head of a target: where they are, and what differs from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .layouts.scheme import FLOAT_DTYPES

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


_BLOCK_BYTES = 8 << 20  # compared at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTables:
    """Where the tables are in a target's folder; both are [V, W]: vocabulary V, width W.

    The head is the embedding where the target ties the two.
    """

    checkpoint: Checkpoint
    embed_tokens: TensorInfo
    lm_head: TensorInfo

    @classmethod
    def find(cls, target: Path) -> "StoredTables":
        """Find the tables by name, reading headers only.

        Names may have any prefix, as in multimodal targets (`language_model.model.embed_tokens`),
        except those of a layer: DeepSeek-V3's multi-token layer repeats the embedding.
        """
        if not target.is_dir():
            raise CheckpointError(target, "no such folder", fix="give the target's local folder")
        checkpoint = Checkpoint.open(target, is_target=True)
        embedding, head = _find(checkpoint, EMBEDDING), _find(checkpoint, HEAD)
        if embedding is None:
            raise CheckpointError(
                target,
                f"no tensor is called {EMBEDDING}, with or without a prefix",
                fix="give the folder of the target, with the shard that holds its embedding",
            )
        if head is None and not _tied(checkpoint):
            raise CheckpointError(
                target,
                f"no tensor is called {HEAD}, and config.json does not say that the target ties it"
                " to the embedding",
                fix="give the shard that holds the head, or write tie_word_embeddings: true if"
                " they are tied",
            )
        tables = cls(checkpoint=checkpoint, embed_tokens=embedding, lm_head=head or embedding)
        tables._check()
        return tables

    def table(self, canonical: str) -> TensorInfo:
        """The table by the name that drafts use."""
        return {EMBEDDING: self.embed_tokens, HEAD: self.lm_head}[canonical]

    def difference(self, source: Checkpoint, tensor: TensorInfo, canonical: str) -> str | None:
        """How a draft's table differs from this one, byte for byte; None = not at all."""
        theirs = self.table(canonical)
        if (tensor.dtype, tensor.shape) != (theirs.dtype, theirs.shape):
            target = f"the target's {theirs.name} {theirs.dtype} {list(theirs.shape)}"
            return f"is {tensor.dtype} {list(tensor.shape)}, {target}"
        row = first_differing_row(source, tensor, self.checkpoint, theirs)
        return None if row is None else f"row {row} differs from that of the target's {theirs.name}"

    def _check(self) -> None:
        where = self.checkpoint.folder
        for tensor in (self.embed_tokens, self.lm_head):
            if tensor.dtype not in FLOAT_DTYPES or len(tensor.shape) != 2 or 0 in tensor.shape:
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointError(
                    where / tensor.file,
                    f"{tensor.name}: expected {' or '.join(FLOAT_DTYPES)} [vocabulary, width], got"
                    f" {got}",
                    fix="give a target whose embedding and head are not quantized",
                )
        if self.embed_tokens.shape != self.lm_head.shape:
            embedding, head = self.embed_tokens, self.lm_head
            shapes = f"{embedding.name} is {list(embedding.shape)}, {head.name} {list(head.shape)}"
            raise CheckpointError(
                where,
                f"{shapes}: expected equal shapes",
                fix="give the target that the draft was trained for",
            )


def first_differing_row(
    ours: Checkpoint, our_table: TensorInfo, theirs: Checkpoint, their_table: TensorInfo
) -> int | None:
    """The first row in which two tables of one dtype and shape differ; None = they are equal.

    Bytes are compared, so 0 and -0 differ; reading stops at the first difference.
    """
    from .decoded_numbers import blocks_of, read_rows  # numpy, which help does not need

    rows = our_table.shape[0]
    step = max(1, _BLOCK_BYTES * rows // max(1, our_table.nbytes))
    for block in blocks_of(rows, step):
        a = read_rows(ours, our_table, block.start, block.stop)
        b = read_rows(theirs, their_table, block.start, block.stop)
        different = (a != b).reshape(len(block), -1).any(axis=1)
        if different.any():
            return block.start + int(different.argmax())
    return None


def _find(checkpoint: Checkpoint, table: str) -> TensorInfo | None:
    tensors = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if f".{name}".endswith(f".{table}") and ".layers." not in f".{name}"
    ]
    if len(tensors) > 1:
        names = ", ".join(tensor.name for tensor in tensors)
        raise CheckpointError(
            checkpoint.folder,
            f"several tensors are called {table}: {names}",
            fix="give a folder that holds only the language model that the draft was trained for",
        )
    return tensors[0] if tensors else None


def _tied(checkpoint: Checkpoint) -> bool:
    """Whether config.json ties the tables; in a multimodal target, its text section."""
    sections = (checkpoint.config, checkpoint.config.get("text_config"))
    return any(isinstance(s, Mapping) and s.get("tie_word_embeddings") is True for s in sections)
