"""Traces: what a target did on prompts. A draft sees nothing else of its target.

A trace folder, format version 1:

    trace.json                 `TraceManifest`: target, features, prompts, shards
    traces-00001.safetensors   for every prompt ID with N tokens, whose first P are the prompt:
                                 "ID.token_ids"    I32 [N], prompt, then the continuation
                                 "ID.features"     [N - 1, width], of positions 0 .. N - 2; in
                                                   another storage as `stored_features` says
                                 "ID.target_top1"  I32 [N - 1], argmax after positions 0 .. N - 2,
                                                   -1 if it is not known
                               and if trace.json has `logprobs`, for tokens P .. N - 1:
                                 "ID.token_logprob"  F32 [N - P]
                                 "ID.top_token_ids"  I32 [N - P, num_top], "ID.top_logprobs" F32,
                                                     if num_top is above 0
    traces-00002.safetensors   …
    tables.safetensors         only with `record --tables`: the target's embedding and head

If recording was greedy, target_top1[P - 1:] equals token_ids[P:]. The last token was never fed to
the target, so it has no feature. Reading treats the folder as hostile input and loads one prompt at
a time.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from ...quantize.files.mapped_rows import BLOCK_ROWS, mapped_rows
from ...quantize.files.safetensors_header import read_header
from ...quantize.stored.loading import CPU
from ...recipes.brief import Brief
from ...recipes.errors import TraceError
from ...recipes.regular_file import check_own, open_stream, read_text
from ...recipes.strict_json import reading
from . import files_raise
from .manifest import (
    MANIFEST_FILE,
    Shard,
    TablesFile,
    TraceEntry,
    TraceManifest,
    manifest_text,
    parse_manifest,
)
from .prompt_trace import FEATURE_DTYPES, PromptTrace, check_trace
from .stored_features import decoded, stored_tensors
from .target_tables import ANY_LENGTH, SharedTables, TensorTable, expected_tensors, shared_tables

_Tensor = tuple[str, tuple[int, ...]]  # dtype and shape
_RECORDED = "give a folder written by 'draftquant record' or 'traces import'"


class TraceFolder(Brief):
    """An opened trace folder. Manifest and headers are checked, tensors are read on demand.

    Its length is the number of prompts, and iterating over it reads them one by one.

    Attributes:
        folder: where it lies.
        manifest: what trace.json holds, checked.
        sha256: hash of trace.json, which holds the hash of every file: the identity of the traces.
            Tables are left out: the same traces with and without them have the same hash.
        warnings: what the command line prints as warnings, of the run that recorded it.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, folder: Path, manifest: TraceManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        traces_only = manifest_text(dataclasses.replace(manifest, tables=None))
        self.sha256 = hashlib.sha256(traces_only.encode()).hexdigest()
        self._opened: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> "TraceFolder":
        """Read and check trace.json and the headers of all files; reads no tensor.

        Raises:
            TraceError: the folder is not a complete, consistent trace folder of version 1, or one
                of its files is a link elsewhere.
        """
        where = folder / MANIFEST_FILE
        with files_raise(TraceError):
            check_own(folder, MANIFEST_FILE)
        with reading(where, TraceError, _RECORDED):
            try:
                manifest = parse_manifest(read_text(where), where)
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise _no_traces(folder) from exc
        for shard in manifest.shards:
            _check_header(folder, shard, _shard_tensors(manifest, shard.file))
        if manifest.tables:
            expected = expected_tensors(manifest.tables, manifest.target.vocab_size)
            _check_header(folder, manifest.tables, expected)
        return cls(folder, manifest)

    def only(self, entries: Collection[TraceEntry]) -> "TraceFolder":
        """Some of its prompts, in its order, as a folder that holds no others would have them."""
        prompts = tuple(entry for entry in self.manifest.prompts if entry in entries)
        manifest = dataclasses.replace(self.manifest, prompts=prompts)
        return TraceFolder(self.folder, manifest)

    def __len__(self) -> int:
        return len(self.manifest.prompts)

    def __iter__(self) -> Iterator[PromptTrace]:
        return (self.load(entry) for entry in self.manifest.prompts)

    def token_ids(self) -> Iterator[tuple[TraceEntry, Tensor]]:
        """Every prompt with its continuation, [N] int32; reads token ids only.

        Raises:
            TraceError: the shard's bytes changed since recording.
        """
        for entry in self.manifest.prompts:
            yield entry, self._tensors(entry, "token_ids")["token_ids"]

    def load(self, entry: TraceEntry) -> PromptTrace:
        """Read one prompt.

        Raises:
            TraceError: the shard's bytes changed since recording, or the trace contradicts itself.
        """
        names = _tensors_of(self.manifest, entry)
        stored = self._tensors(entry, *names)
        spec, rows, where = self.manifest.features, entry.num_tokens - 1, self.folder / entry.file
        of_features = stored_tensors(spec, rows)
        features, scales = decoded(stored, spec, rows, f"{where}: prompt {entry.id}")
        tensors = {
            name: tensor.to(torch.int64) if names[name][0] == "I32" else tensor
            for name, tensor in stored.items()
            if name not in of_features
        }
        trace = PromptTrace(
            id=entry.id,
            category=entry.category,
            prompt_length=entry.prompt_length,
            conversation_sha256=entry.conversation_sha256,
            cluster=entry.cluster,
            features=features,
            feature_scales=scales,
            **tensors,
        )
        check_trace(trace, self.manifest, where)
        return trace

    def _tensors(self, entry: TraceEntry, *names: str) -> dict[str, Tensor]:
        shard = self._open(next(s for s in self.manifest.shards if s.file == entry.file))
        long = entry.num_tokens > BLOCK_ROWS and self.manifest.features.storage is None
        try:
            return {
                name: self._mapped(entry, name)
                if long and name == "features"
                else shard.get_tensor(f"{entry.id}.{name}")
                for name in names
            }
        except SafetensorError as exc:
            raise TraceError(self.folder / entry.file, f"{entry.id}: {exc}",
                             fix="record the traces again") from exc  # fmt: skip

    def _mapped(self, entry: TraceEntry, name: str) -> Tensor:
        """A tensor of a file whose hash is checked; what is looked at of it can be given back."""
        path, names = self.folder / entry.file, _tensors_of(self.manifest, entry)
        header = read_header(self.folder, entry.file)
        at = next(tensor for tensor in header.tensors if tensor.name == f"{entry.id}.{name}")
        dtype = FEATURE_DTYPES[self.manifest.features.dtype][0]
        with reading(path, TraceError, _RECORDED):
            return mapped_rows(path, at.start, names[name][1], dtype)

    def tables(
        self, dtype: torch.dtype | None = torch.float32, device: torch.device = CPU
    ) -> SharedTables:
        """The target's tables that the folder carries, for `load_draft`; empty if it carries none.

        Nothing is read before a draft asks. An embedding row that is not carried is NaN.

        `dtype`: of the tables; None = as the target stores them.
        """
        tables = self.manifest.tables
        if tables is None:
            return SharedTables({})
        vocab_size, where = self.manifest.target.vocab_size, self.folder / tables.file
        return shared_tables(
            lambda: self._open(tables), tables, vocab_size, where, dtype=dtype, device=device
        )

    def stored_tables(self) -> dict[str, Tensor]:
        """The tensors of its tables file as they are stored; empty if it carries none."""
        if self.manifest.tables is None:
            return {}
        opened = self._open(self.manifest.tables)
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def _open(self, listed: Shard | TablesFile) -> Any:
        """Open a file; its hash is checked the first time, before any of its bytes is used."""
        if listed.file not in self._opened:
            path = self.folder / listed.file
            if file_sha256(path) != listed.sha256:
                raise TraceError(path, f"sha256 differs from the one in {MANIFEST_FILE}",
                                 fix="copy the folder again, or record again")  # fmt: skip
            self._opened[listed.file] = safe_open(path, framework="pt")
        return self._opened[listed.file]

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "folder": self.folder,
            "prompts": len(self),
            "tokens": f"{self.manifest.num_tokens:,}",
            "target": self.manifest.target.name,
            "warnings": len(self.warnings) or None,
        }


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, hex."""
    with open_stream(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _no_traces(folder: Path) -> TraceError:
    if folder.is_file():
        record = "record what the target does on the prompts: draftquant record --target TARGET"
        what = f"--draft DRAFT --tables --prompts {quote(str(folder))} --out TRACES"
        return TraceError(folder, "is a file, not a trace folder", fix=f"{record} {what}")
    if not folder.exists():
        return TraceError(folder, "no such folder", fix=_RECORDED)
    what = "it is a model's folder" if (folder / "config.json").exists() else "has no trace.json"
    return TraceError(folder, f"{what}, so it is not a trace folder", fix=_RECORDED)


def _shard_tensors(manifest: TraceManifest, file: str) -> TensorTable:
    return {
        f"{entry.id}.{name}": tensor
        for entry in manifest.prompts
        if entry.file == file
        for name, tensor in _tensors_of(manifest, entry).items()
    }


def _tensors_of(manifest: TraceManifest, entry: TraceEntry) -> TensorTable:
    rows, continued = entry.num_tokens - 1, entry.num_tokens - entry.prompt_length
    tensors: TensorTable = {
        "token_ids": ("I32", (entry.num_tokens,)),
        **stored_tensors(manifest.features, rows),
        "target_top1": ("I32", (rows,)),
    }
    if manifest.logprobs is not None:
        tensors["token_logprob"] = ("F32", (continued,))
        if manifest.logprobs.num_top:
            tensors["top_token_ids"] = ("I32", (continued, manifest.logprobs.num_top))
            tensors["top_logprobs"] = ("F32", (continued, manifest.logprobs.num_top))
    return tensors


def _check_header(folder: Path, listed: Shard | TablesFile, expected: TensorTable) -> None:
    path = folder / listed.file
    with files_raise(TraceError):
        check_own(folder, listed.file)
    if path.is_file() and path.stat().st_size != listed.nbytes:
        raise TraceError(path, f"expected {listed.nbytes} bytes, got {path.stat().st_size}",
                         fix="copy the folder again, or record again")  # fmt: skip
    with files_raise(TraceError, "record the traces again"):
        header = read_header(folder, listed.file)
    stored = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for name in sorted({*expected, *stored}):
        wanted, got = expected.get(name), stored.get(name)
        if not _fits(wanted, got):
            raise TraceError(
                path,
                f"{name}: expected {_described(wanted)}, got {_described(got)}",
                fix="record the traces again",
            )


def _fits(expected: _Tensor | None, stored: _Tensor | None) -> bool:
    if expected is None or stored is None or ANY_LENGTH not in expected[1]:
        return expected == stored
    return expected[0] == stored[0] and len(expected[1]) == len(stored[1])


def _described(tensor: _Tensor | None) -> str:
    if tensor is None:
        return "no such tensor"
    shape = ["any" if axis == ANY_LENGTH else axis for axis in tensor[1]]
    return f"{tensor[0]} [{', '.join(map(str, shape))}]"
