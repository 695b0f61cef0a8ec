"""Writing a trace folder: shards of bounded size, then trace.json, published by one rename."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ...quantize.files.checkpoint import UNVERIFIED
from ...quantize.files.mapped_rows import row_blocks
from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import StoredTensor
from ...quantize.files.staging import check_output, staged_output, write_text
from ...quantize.numerics.number_formats import FP8
from ...recipes.errors import TraceError
from .manifest import (
    MANIFEST_FILE,
    TABLES_FILE,
    Shard,
    TableDtype,
    TablesFile,
    TargetIdentity,
    TraceEntry,
    TraceManifest,
    check_manifest,
    manifest_text,
)
from .prompt_trace import FEATURE_DTYPES, PromptTrace, check_trace
from .stored_features import check_storage, encoded
from .target_tables import TargetTables, write_tables
from .trace_folder import TraceFolder, file_sha256


class CarriedTables:
    """The tables of trace folders of one target, at least one, written together."""

    def __init__(self, folders: Sequence[TraceFolder]) -> None:
        self._folders = folders

    @property
    def nbytes(self) -> int:
        """Their size on disk, at most."""
        return sum(listed.nbytes for _, listed in self._listed())

    def write(self, path: Path) -> TablesFile:
        """Write a tables file with every embedding that one of the folders carries."""
        (first, listed), *_ = every = self._listed()
        tensors, rows = first.stored_tables(), dict[int, Tensor]()
        for folder, theirs in every:
            stored = tensors if folder is first else folder.stored_tables()
            ids, embeddings = stored.pop("token_ids"), stored.pop("embed_tokens")
            same = _form(theirs) == _form(listed)
            same = same and all(torch.equal(x, tensors[name]) for name, x in stored.items())
            for token, row in zip(ids.tolist(), embeddings, strict=True):
                same = same and torch.equal(rows.setdefault(token, row), row)
            if not same:
                where, other = folder.folder, self._folders[0].folder
                raise TraceError(
                    where,
                    f"its embedding and head differ from those of {other}: it was recorded from"
                    " another target",
                    fix="merge traces of one target",
                )
        token_ids = sorted(rows)
        tensors |= {
            "token_ids": torch.tensor(token_ids, dtype=torch.int32),
            "embed_tokens": torch.stack([rows[token] for token in token_ids]),
        }
        _write_tensors(path, tensors)
        return dataclasses.replace(
            listed,
            nbytes=path.stat().st_size,
            sha256=file_sha256(path),
            num_token_ids=len(token_ids),
        )

    def _listed(self) -> list[tuple[TraceFolder, TablesFile]]:
        return [(f, f.manifest.tables) for f in self._folders if f.manifest.tables is not None]


def _form(listed: TablesFile) -> TablesFile:
    """All fields except those that differ between folders of one target."""
    return dataclasses.replace(listed, nbytes=0, sha256="", num_token_ids=0)


SHARD_BYTES = 512 * 2**20

_STORED_DTYPES = {torch.int32: "I32", torch.uint8: "U8", FP8: "F8_E4M3"} | dict(
    FEATURE_DTYPES.values()
)


class TraceWriter:
    """Collects traces into shards below a staging folder, which may hold nameless files too."""

    def __init__(
        self,
        out: Path,
        staging: Path,
        head: TraceManifest,
        shard_bytes: int,
        tables: TargetTables | CarriedTables | None,
        table_ids: Collection[int],
    ) -> None:
        self.staging = staging
        self._out = out  # for errors: users do not know the staging folder
        self._head = head
        self._shard_bytes = shard_bytes
        self._tables = tables
        self._token_ids = set(table_ids)
        self._pending: dict[str, Tensor] = {}
        self._entries: dict[int, TraceEntry] = {}
        self._shards: list[Shard] = []

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Write one trace at its place in trace.json, in any order of writing."""
        if position in self._entries:
            taken_by = self._entries[position].id
            raise TraceError(trace.id, f"position {position} is taken by {taken_by}",
                             fix="number the prompts")  # fmt: skip
        check_trace(trace, self._head, self._out)
        tensors = {f"{trace.id}.{name}": tensor for name, tensor in self._stored(trace).items()}
        if self._pending and _nbytes(self._pending) + _nbytes(tensors) > self._shard_bytes:
            self._flush()
        # A second prompt with the same id is refused by check_manifest; it must not hide the first.
        self._entries[position] = TraceEntry(
            id=trace.id,
            category=trace.category,
            prompt_length=trace.prompt_length,
            num_tokens=trace.num_tokens,
            file=self._next_file(),
            conversation_sha256=trace.conversation_sha256,
            cluster=trace.cluster,
        )
        self._pending |= tensors
        self._token_ids.update(trace.token_ids.tolist())

    def finish(self) -> None:
        """Write the last shard, the tables and trace.json."""
        if self._pending:
            self._flush()
        entries = tuple(entry for _, entry in sorted(self._entries.items()))
        manifest = dataclasses.replace(
            self._head,
            num_tokens=sum(entry.num_tokens for entry in entries),
            prompts=entries,
            shards=tuple(self._shards),
            tables=self._write_tables(),
        )
        check_manifest(manifest, self._out / MANIFEST_FILE)
        write_text(self.staging / f"{MANIFEST_FILE}{UNVERIFIED}", manifest_text(manifest))

    def _stored(self, trace: PromptTrace) -> dict[str, Tensor]:
        tensors = {
            "token_ids": trace.token_ids.to(torch.int32),
            **encoded(trace.features, trace.feature_scales, self._head.features),
            "target_top1": trace.target_top1.to(torch.int32),
        }
        if trace.token_logprob is not None:
            tensors["token_logprob"] = trace.token_logprob.contiguous()
        if trace.top_token_ids is not None and trace.top_logprobs is not None:
            tensors["top_token_ids"] = trace.top_token_ids.to(torch.int32)
            tensors["top_logprobs"] = trace.top_logprobs.contiguous()
        return tensors

    def _flush(self) -> None:
        path = self.staging / self._next_file()
        _write_tensors(path, self._pending)
        self._shards.append(
            Shard(file=path.name, nbytes=path.stat().st_size, sha256=file_sha256(path))
        )
        self._pending = {}

    def _write_tables(self) -> TablesFile | None:
        path, tables = self.staging / TABLES_FILE, self._tables
        if isinstance(tables, CarriedTables):
            return tables.write(path)
        if tables is None:
            return None
        write_tables(path, tables, sorted(self._token_ids))
        return TablesFile(
            nbytes=path.stat().st_size,
            sha256=file_sha256(path),
            num_token_ids=len(self._token_ids),
            width=tables.width,
            embed_tokens_dtype=cast(TableDtype, tables.embed_tokens.dtype),
            lm_head_dtype=cast(TableDtype, tables.lm_head.dtype),
            norm_dtype=cast(TableDtype, tables.norm.dtype) if tables.norm else None,
        )

    def _next_file(self) -> str:
        return f"traces-{len(self._shards) + 1:05d}.safetensors"


@contextmanager
def trace_output(
    out: Path,
    head: TraceManifest,
    *,
    shard_bytes: int = SHARD_BYTES,
    tables: TargetTables | CarriedTables | None = None,
    table_ids: Collection[int] = (),
) -> Iterator[TraceWriter]:
    """Write a trace folder; leaving the block without an exception publishes it.

    Prompts and files are those that are written, whatever `head` says about them; a new shard
    begins before one grows beyond `shard_bytes`. Tables of the target are carried, or those of
    other trace folders, with the embeddings of the tokens of the traces and of `table_ids`.
    """
    check_storage(head.features.storage)
    needed = tables.lm_head.nbytes if isinstance(tables, TargetTables) else 0
    check_output(out, needed_bytes=tables.nbytes if isinstance(tables, CarriedTables) else needed)
    if isinstance(tables, TargetTables):
        _check_tables(tables, table_ids, head.target)
    with staged_output(out, last=MANIFEST_FILE) as staging:
        writer = TraceWriter(out, staging, head, shard_bytes, tables, table_ids)
        yield writer
        writer.finish()


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    stored = [
        StoredTensor(name=name, dtype=_STORED_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    with SafetensorsFile(path, stored, {}) as file:
        for name, tensor in tensors.items():
            written = 0
            for block in row_blocks(tensor):
                written += file.write(name, block, offset=written)


def _check_tables(tables: TargetTables, table_ids: Collection[int], target: TargetIdentity) -> None:
    if tables.vocab_size != target.vocab_size:
        what = f"its embedding has {tables.vocab_size} rows, the vocabulary {target.vocab_size}"
        fix = "give the folder of the recorded target"
        raise TraceError(tables.checkpoint.folder, what, fix=fix)
    for token in table_ids:
        if not 0 <= token < target.vocab_size:
            what = f"expected ids in [0, {target.vocab_size}), the target's vocabulary"
            raise TraceError(f"token id {token}", what, fix="give ids of this target: --table-ids")


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
