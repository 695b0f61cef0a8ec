"""Re-reading a transcoded folder against the one whose codes it has: every code, every scale.

Both are decoded as they declare; a carrier or another packing changes no number. Imports no torch.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..drafts import Row
from ..drafts.kv_cache import UNIT
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, tensor_digest
from ..files.finiteness import Finiteness
from ..files.workers import WORKERS
from ..stored.decoded_numbers import stored_scalar
from ..stored.layouts.scheme import INVERTED
from ..stored.parts import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft
from .dequantized_verification import row_blocks
from .headers import index_faults, metadata_faults
from .kept_tensors import compare_kept
from .unowned_files import QUANTIZED_ONLY, own_files, side_file_faults, unowned_faults
from .verify_report import Fault, NotFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedReport:
    """The result of `verify_transcoded`.

    Attributes:
        scheme: what the new folder declares.
        source_digests: per tensor of the folder that was read.
        output_digests: per tensor of the new one.
        faults: all of them; empty means that every code and scale is the same.
    """

    scheme: str
    source_digests: Mapping[str, str]
    output_digests: Mapping[str, str]
    faults: tuple[Fault, ...]


def verify_transcoded(
    source: StoredDraft,
    folder: Path,
    *,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> TranscodedReport:
    """Compare two quantized folders of the same draft.

    Args:
        config_file: its name in a staging folder, see `Checkpoint.open`.

    Raises:
        CheckpointError: `folder` is not a draft, or not as it declares.
        VerifyError: its declaration is not understood.
    """
    output = StoredDraft.read(Checkpoint.open(folder, config_file=config_file))
    faults = _folder_faults(source, output, config_file)
    rows = {row.tensor.name: row for row in output.draft.rows}
    names = sorted(row.tensor.name for row in source.draft.rows)
    if source.modules != output.modules or names != sorted(rows):
        got = ", ".join(sorted(source.modules ^ output.modules)) or "other tensors"
        return TranscodedReport(
            scheme=str(output.scheme),
            source_digests={},
            output_digests={},
            faults=(*faults, Fault(where=str(folder), expected="the same linears", got=got)),
        )
    by_size = sorted(source.draft.rows, key=lambda row: (-row.tensor.numel, row.tensor.name))
    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(partial(_compare, source, output, rows, algorithm), by_size))
    found.append(_compare_caches(source, output, algorithm))
    return TranscodedReport(
        scheme=str(output.scheme),
        source_digests=dict(sorted(item for one in found for item in one.source_digests.items())),
        output_digests=dict(sorted(item for one in found for item in one.output_digests.items())),
        faults=(*faults, *(fault for one in found for fault in one.faults)),
    )


@dataclass(slots=True, kw_only=True)
class _Compared:
    """One row of the draft; hashes by tensor name."""

    source_digests: dict[str, str] = field(default_factory=dict)
    output_digests: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def _folder_faults(source: StoredDraft, output: StoredDraft, config_file: str) -> list[Fault]:
    """What stands beside the tensors is the source's; the declaration is the new one."""
    before, after = source.checkpoint, output.checkpoint
    scheme, faults = output.scheme, []
    own = own_files(scheme.layout.side_file.name if scheme and scheme.layout.side_file else None)
    if _undeclared(before) != _undeclared(after):
        expected = "the source's, but for its declaration"
        faults.append(Fault(where=CONFIG_FILE, expected=expected, got="other"))
    if source.scheme is not None and scheme is not None:
        pair = source.scheme.activations, scheme.activations
        if pair[0] != pair[1]:
            where = f"{CONFIG_FILE}: activations"
            faults.append(Fault(where=where, expected=pair[0], got=pair[1]))
    return [
        *faults,
        *index_faults(after),
        *metadata_faults(before, after),
        *side_file_faults(before, after, without=QUANTIZED_ONLY),
        *unowned_faults(before, after, config_file=config_file, own=own, without=QUANTIZED_ONLY),
    ]


def _undeclared(checkpoint: Checkpoint) -> str:
    """config.json without its declaration, as text that tells 1 from true and 1.0."""
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    return json.dumps(config, sort_keys=True)


def _compare(
    source: StoredDraft,
    output: StoredDraft,
    rows: Mapping[str, Row],
    algorithm: Algorithm,
    row: Row,
) -> _Compared:
    found = _Compared()
    if not source.is_quantized(row):
        sides = source.checkpoint, output.checkpoint
        kept = compare_kept(*sides, row.tensor, lambda _count: None, algorithm)
        found.source_digests, found.output_digests = kept.source_digests, kept.output_digests
        found.faults = kept.faults
        return found
    other = rows[row.tensor.name]
    for side, own, hashes in (
        (source, row, found.source_digests),
        (output, other, found.output_digests),
    ):
        for part in side.parts(own).values():
            hashes[part.name] = tensor_digest(side.checkpoint, part, algorithm)
    found.faults = [
        *_code_faults(source, output, row, other),
        *_input_scale_faults(source, output, row.module),
    ]
    return found


def _compare_caches(source: StoredDraft, output: StoredDraft, algorithm: Algorithm) -> _Compared:
    """The KV caches that are declared: of one format, under the same scales."""
    found = _Compared()
    for side, hashes in ((source, found.source_digests), (output, found.output_digests)):
        for _, _, tensor in side.cache_tensors:
            hashes[tensor.name] = tensor_digest(side.checkpoint, tensor, algorithm)
    layers = range(source.draft.geometry.num_layers)
    before, after = (
        cache and (cache.dtype, [cache.scales.get(layer, UNIT) for layer in layers])
        for cache in (source.kv_cache(), output.kv_cache())
    )
    if before != after:
        where = f"{CONFIG_FILE}: KV cache"
        found.faults.append(Fault(where=where, expected=f"{before}", got=f"{after}"))
    return found


def _code_faults(source: StoredDraft, output: StoredDraft, row: Row, other: Row) -> list[Fault]:
    """Codes and what multiplies them, bit for bit: also a -0 is not a 0."""
    before, after = source.linear(row), output.linear(other)
    finiteness, codes, scales = Finiteness("F32", row.tensor.shape), 0, 0
    for rows in row_blocks(row):
        a, b = before.decoded(rows), after.decoded(rows)
        finiteness.look(np.ascontiguousarray(a.codes))
        codes += int(np.count_nonzero(a.codes.view(np.uint32) != b.codes.view(np.uint32)))
        if a.scale.shape != b.scale.shape or a.group_size != b.group_size:
            scales += a.scale.size
        else:
            scales += int(np.count_nonzero(a.scale != b.scale))
    named = {"the source's quantized values": codes, "the source's scales": scales}
    others = [
        Fault(where=row.module, expected=what, got=f"{count} other(s)")
        for what, count in named.items()
        if count
    ]
    return [*NotFinite.of(row.tensor.name, finiteness.problem), *others]


def _input_scale_faults(source: StoredDraft, output: StoredDraft, module: str) -> list[Fault]:
    """The same static scale of the input as kernels have it, where it has one."""
    a, b = (_input_scale(side, module) for side in (source, output))
    if a == b:
        bad = None if a is None or np.isfinite(a) else f"{a}"
        return NotFinite.of(f"{module}: input scale", bad)
    return [Fault(where=f"{module}: input scale", expected=f"{a}", got=f"{b}")]


def _input_scale(side: StoredDraft, module: str) -> np.float32 | None:
    """Kernels multiply inputs by the inverse of NVFP4's, which only some layouts store."""
    scheme = side.scheme.of(module) if side.scheme else None
    for suffix in INPUT_SCALES:
        tensor = side.checkpoint.tensors.get(f"{module}.{suffix}")
        if tensor is not None and scheme is not None:
            value = np.float32(stored_scalar(side.checkpoint, tensor))
            inverted = scheme.activations in INVERTED and suffix != INVERSE_INPUT_SCALE
            return np.float32(1) / value if inverted else value
    return None
