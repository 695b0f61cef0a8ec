"""Traces: what a target did on prompts, all that a draft ever sees of it.

A trace folder, format version 1:

    trace.json                 `trace_manifest.TraceManifest`: target, features, prompts, shards
    traces-00001.safetensors   for every prompt ID with N tokens, P of them its prompt:
                                 "ID.token_ids"    I32 [N], prompt, then the greedy continuation
                                 "ID.features"     [N - 1, width], of positions 0 .. N - 2
                                 "ID.target_top1"  I32 [N - 1], argmax after positions 0 .. N - 2
    traces-00002.safetensors   …
    tables.safetensors         only if asked for: see `trace_tables`

Recording is greedy: target_top1[P - 1:] equals token_ids[P:]. The last token was never fed to the
target, so it has no feature. Reading treats the folder as hostile input and loads one prompt at a
time.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..quantize.errors import CheckpointError
from ..quantize.files.safetensors_header import read_header
from ..recipes.regular_file import open_stream, read_text
from .errors import TraceError
from .target_tables import SharedTables
from .trace_manifest import (
    MANIFEST_FILE,
    FeatureDtype,
    FeatureSpec,
    Shard,
    TablesFile,
    TargetIdentity,
    TraceEntry,
    TraceManifest,
    manifest_text,
    parse_manifest,
)
from .trace_tables import TensorTable, expected_tensors, shared_tables

FEATURE_DTYPES: dict[FeatureDtype, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "float64": (torch.float64, "F64"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}
"""Manifest spelling -> (torch dtype, safetensors spelling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrace:
    """One prompt and its greedy continuation.

    Attributes:
        id: unique within the folder. category: for per-category figures.
        prompt_length: P, tokens that were given.
        token_ids: [N] int64.
        features: [N - 1, width], dtype of the manifest, finite.
        target_top1: [N - 1] int64, the target's argmax after each position.
    """

    id: str
    category: str
    prompt_length: int
    token_ids: Tensor
    features: Tensor
    target_top1: Tensor

    @property
    def num_tokens(self) -> int:
        """N, prompt and continuation."""
        return self.token_ids.shape[0]

    @property
    def prompt_sha256(self) -> str:
        """Identity of the prompt: see `prompt_sha256`."""
        return prompt_sha256(self.token_ids[: self.prompt_length].tolist())

    @property
    def continuation(self) -> tuple[int, ...]:
        """The token ids that the target chose."""
        return tuple(self.token_ids[self.prompt_length :].tolist())


def prompt_sha256(token_ids: Sequence[int]) -> str:
    """Identity of a prompt whatever its id: hash of its token ids, decimal, with commas between."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


class TraceFolder:
    """An opened trace folder: manifest and headers are checked, tensors are read on demand.

    Attributes:
        folder: where it lies.
        manifest: trace.json, checked.
        sha256: hash of trace.json, which holds the hash of every shard: the identity of the traces.
            Tables are left out: the same traces with and without them are the same.
    """

    def __init__(self, folder: Path, manifest: TraceManifest, sha256: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sha256 = sha256
        self._opened: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> "TraceFolder":
        """Read and check trace.json and the headers of all files; reads no tensor.

        Raises:
            TraceError: the folder is not a complete, consistent trace folder of version 1.
        """
        where = folder / MANIFEST_FILE
        try:
            manifest = parse_manifest(read_text(where), where)
        except OSError as exc:
            raise TraceError(
                where, f"cannot be read: {exc}", fix="give a folder written by 'draftquant record'"
            ) from exc
        for shard in manifest.shards:
            _check_header(folder, shard, _shard_tensors(manifest, shard.file))
        if manifest.tables:
            expected = expected_tensors(manifest.tables, manifest.target.vocab_size)
            _check_header(folder, manifest.tables, expected)
        traces_only = manifest_text(dataclasses.replace(manifest, tables=None))
        return cls(folder, manifest, hashlib.sha256(traces_only.encode()).hexdigest())

    def __len__(self) -> int:
        return len(self.manifest.prompts)

    def __iter__(self) -> Iterator[PromptTrace]:
        return (self.load(entry) for entry in self.manifest.prompts)

    def prompt_sha256s(self) -> Iterator[tuple[TraceEntry, str]]:
        """Every prompt with its identity; reads token ids only.

        Raises:
            TraceError: the shard's bytes changed since recording.
        """
        for entry in self.manifest.prompts:
            token_ids = self._tensors(entry, "token_ids")["token_ids"]
            yield entry, prompt_sha256(token_ids[: entry.prompt_length].tolist())

    def load(self, entry: TraceEntry) -> PromptTrace:
        """Read one prompt.

        Raises:
            TraceError: the shard's bytes changed since recording, or the trace contradicts itself.
        """
        tensors = self._tensors(entry, "token_ids", "features", "target_top1")
        trace = PromptTrace(
            id=entry.id,
            category=entry.category,
            prompt_length=entry.prompt_length,
            token_ids=tensors["token_ids"].to(torch.int64),
            features=tensors["features"],
            target_top1=tensors["target_top1"].to(torch.int64),
        )
        check_trace(trace, self.manifest.target, self.manifest.features, self.folder / entry.file)
        return trace

    def _tensors(self, entry: TraceEntry, *names: str) -> dict[str, Tensor]:
        shard = self._open(next(s for s in self.manifest.shards if s.file == entry.file))
        try:
            return {name: shard.get_tensor(f"{entry.id}.{name}") for name in names}
        except SafetensorError as exc:
            raise TraceError(self.folder / entry.file, f"{entry.id}: {exc}",
                             fix="record the traces again") from exc  # fmt: skip

    def tables(self, dtype: torch.dtype = torch.float32) -> SharedTables:
        """The target's tables that the folder carries, for `load_draft`; empty if it carries none.

        Nothing is read before a draft asks. An embedding row that is not carried is NaN.
        """
        tables = self.manifest.tables
        if tables is None:
            return SharedTables({})
        vocab_size, where = self.manifest.target.vocab_size, self.folder / tables.file
        return shared_tables(lambda: self._open(tables), tables, vocab_size, where, dtype)

    def _open(self, listed: Shard | TablesFile) -> Any:
        """Open a file; its hash is checked the first time, before any of its bytes is used."""
        if listed.file not in self._opened:
            path = self.folder / listed.file
            if file_sha256(path) != listed.sha256:
                raise TraceError(path, f"sha256 differs from the one in {MANIFEST_FILE}",
                                 fix="copy the folder again, or record again")  # fmt: skip
            self._opened[listed.file] = safe_open(path, framework="pt")
        return self._opened[listed.file]


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, hex."""
    with open_stream(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_trace(
    trace: PromptTrace, target: TargetIdentity, features: FeatureSpec, where: object
) -> None:
    """Check one trace in memory: shapes, dtype, ranges, and that decoding was greedy.

    Raises:
        TraceError: names the prompt and the first contradiction.
    """
    problem = _trace_problem(trace, target, features)
    if problem:
        raise TraceError(where, f"prompt {trace.id}: {problem[0]}", fix=problem[1])


def _trace_problem(
    trace: PromptTrace, target: TargetIdentity, features: FeatureSpec
) -> tuple[str, str] | None:
    again = "record the traces again"
    count, start = trace.num_tokens, trace.prompt_length
    if not 1 <= start < count:
        return f"{count} tokens with a prompt of {start} leave no continuation", again
    expected = (count - 1, features.width)
    if tuple(trace.features.shape) != expected or trace.target_top1.shape != (count - 1,):
        return (
            f"expected features {list(expected)} and target_top1 [{count - 1}], got"
            f" {list(trace.features.shape)} and {list(trace.target_top1.shape)}",
            again,
        )
    if trace.features.dtype != FEATURE_DTYPES[features.dtype][0]:
        return f"expected {features.dtype} features, got {trace.features.dtype}", again
    for name, ids in (("token_ids", trace.token_ids), ("target_top1", trace.target_top1)):
        if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
            return f"{name}: expected ids in [0, {target.vocab_size})", again
    if not bool(torch.isfinite(trace.features).all()):
        return "features contain NaN or infinity", "record in a wider dtype"
    greedy = trace.target_top1[start - 1 :] == trace.token_ids[start:]
    if not bool(greedy.all()):
        first = start + int(greedy.int().argmin())
        return (
            f"the trace is not greedy: token {first} is {int(trace.token_ids[first])}, the target's"
            f" argmax was {int(trace.target_top1[first - 1])}",
            "record at temperature 0, without penalties or grammar",
        )
    return None


def _shard_tensors(manifest: TraceManifest, file: str) -> TensorTable:
    expected: TensorTable = {}
    dtype = FEATURE_DTYPES[manifest.features.dtype][1]
    for entry in manifest.prompts:
        if entry.file == file:
            rows = entry.num_tokens - 1
            expected[f"{entry.id}.token_ids"] = ("I32", (entry.num_tokens,))
            expected[f"{entry.id}.features"] = (dtype, (rows, manifest.features.width))
            expected[f"{entry.id}.target_top1"] = ("I32", (rows,))
    return expected


def _check_header(folder: Path, listed: Shard | TablesFile, expected: TensorTable) -> None:
    path = folder / listed.file
    if path.is_file() and path.stat().st_size != listed.nbytes:
        raise TraceError(path, f"expected {listed.nbytes} bytes, got {path.stat().st_size}",
                         fix="copy the folder again, or record again")  # fmt: skip
    try:
        header = read_header(folder, listed.file)
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix="record the traces again") from exc
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise TraceError(
                path,
                f"{name}: expected {_described(expected.get(name))}, got"
                f" {_described(found.get(name))}",
                fix="record the traces again",
            )


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}" if tensor else "no such tensor"
