"""Traces: what a target did on prompts, all that a draft ever sees of it.

A trace folder, format version 1:

    trace.json                 `trace_manifest.TraceManifest`: target, features, prompts, shards
    traces-00001.safetensors   for every prompt ID with N tokens, P of them its prompt:
                                 "ID.token_ids"    I32 [N], prompt, then the greedy continuation
                                 "ID.features"     [N - 1, width], of positions 0 .. N - 2
                                 "ID.target_top1"  I32 [N - 1], argmax after positions 0 .. N - 2
    traces-00002.safetensors   …

Recording is greedy: target_top1[P - 1:] equals token_ids[P:]. The last token was never fed to the
target, so it has no feature. Reading treats the folder as hostile input and loads one prompt at a
time.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..quantize.errors import CheckpointError
from ..quantize.safetensors_header import read_header
from .errors import TraceError
from .trace_manifest import (
    MANIFEST_FILE,
    FeatureDtype,
    FeatureSpec,
    TargetIdentity,
    TraceEntry,
    TraceManifest,
    parse_manifest,
)

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
    def continuation(self) -> tuple[int, ...]:
        """The token ids that the target chose."""
        return tuple(self.token_ids[self.prompt_length :].tolist())


class TraceFolder:
    """An opened trace folder: manifest and headers are checked, tensors are read on demand.

    Attributes:
        folder: where it lies.
        manifest: trace.json, checked.
        sha256: hash of trace.json, which holds the hash of every shard: the identity of the traces.
    """

    def __init__(self, folder: Path, manifest: TraceManifest, sha256: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sha256 = sha256
        self._shards: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> "TraceFolder":
        """Read and check trace.json and the headers of all shards; reads no tensor.

        Raises:
            TraceError: the folder is not a complete, consistent trace folder of version 1.
        """
        where = folder / MANIFEST_FILE
        try:
            text = where.read_bytes()
            manifest = parse_manifest(text.decode(), where)
        except (OSError, UnicodeDecodeError) as exc:
            raise TraceError(
                where, f"cannot be read: {exc}", fix="give a folder written by 'draftquant record'"
            ) from exc
        for shard in manifest.shards:
            _check_header(folder, manifest, shard.file, shard.nbytes)
        return cls(folder, manifest, hashlib.sha256(text).hexdigest())

    def __len__(self) -> int:
        return len(self.manifest.prompts)

    def __iter__(self) -> Iterator[PromptTrace]:
        return (self.load(entry) for entry in self.manifest.prompts)

    def load(self, entry: TraceEntry) -> PromptTrace:
        """Read one prompt.

        Raises:
            TraceError: the shard's bytes changed since recording, or the trace contradicts itself.
        """
        shard = self._shard(entry.file)
        try:
            tensors = {
                name: shard.get_tensor(f"{entry.id}.{name}")
                for name in ("token_ids", "features", "target_top1")
            }
        except SafetensorError as exc:
            raise TraceError(self.folder / entry.file, f"{entry.id}: {exc}",
                             fix="record the traces again") from exc  # fmt: skip
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

    def _shard(self, file: str) -> Any:
        """Open a shard; its hash is checked the first time, before any of its bytes is used."""
        if file not in self._shards:
            path = self.folder / file
            expected = next(s.sha256 for s in self.manifest.shards if s.file == file)
            if file_sha256(path) != expected:
                raise TraceError(path, f"sha256 differs from the one in {MANIFEST_FILE}",
                                 fix="copy the folder again, or record again")  # fmt: skip
            self._shards[file] = safe_open(path, framework="pt")
        return self._shards[file]


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, hex."""
    with path.open("rb") as stream:
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


def _check_header(folder: Path, manifest: TraceManifest, file: str, nbytes: int) -> None:
    path = folder / file
    if path.is_file() and path.stat().st_size != nbytes:
        raise TraceError(path, f"expected {nbytes} bytes, got {path.stat().st_size}",
                         fix="copy the folder again, or record again")  # fmt: skip
    try:
        header = read_header(folder, file)
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix="record the traces again") from exc
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    dtype = FEATURE_DTYPES[manifest.features.dtype][1]
    for entry in manifest.prompts:
        if entry.file == file:
            rows = entry.num_tokens - 1
            expected[f"{entry.id}.token_ids"] = ("I32", (entry.num_tokens,))
            expected[f"{entry.id}.features"] = (dtype, (rows, manifest.features.width))
            expected[f"{entry.id}.target_top1"] = ("I32", (rows,))
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
