"""Re-reading a transcoded folder against the one whose codes it has: every code, every scale.

Both are decoded as they declare; a carrier or another packing changes no number. Imports no torch.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..drafts import Row, read_draft
from ..drafts.draft_cache import UNIT
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, Finiteness, tensor_digest
from ..files.safetensors_header import WORKERS, FloatDtype
from ..stored.decoded_numbers import Floats, floats, read_rows, stored_scalar
from ..stored.layouts.scheme import INVERTED
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft
from .folder_faults import (
    QUANTIZED_ONLY,
    index_faults,
    metadata_faults,
    own_files,
    side_file_faults,
    unowned_faults,
)
from .scales import rounded_bytes
from .verify_report import Fault, NotFinite, compare_kept

# ---- Re-reading a dequantized folder against the quantized one that it was made from
#
# Every weight is decoded again and rounded by other means than those that wrote it (integer
# arithmetic for BF16, numpy for F16), then compared bit by bit. Imports no torch.

_BLOCK = 2**18  # weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedLinear:
    """What rounding to the output's dtype lost of one linear; p is the float32 code * scale.

    Attributes:
        module: on-disk name.
        elements: weights of the linear.
        rounded: weights whose stored value differs from p.
        max_relative_difference: largest |stored - p| / |p| over p != 0. Half an ulp is at most
            2^-8 for BF16 and 2^-11 for F16, but for subnormals; 0 for F32.
    """

    module: str
    elements: int
    rounded: int
    max_relative_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedReport:
    """The result of `verify_dequantized`.

    Attributes:
        kept: tensors with the source's bytes. linears: those decoded and compared.
        source_digests: per tensor of the quantized folder. output_digests: per tensor of the other.
        faults: all of them; empty means that every bit is accounted for.
    """

    kept: int
    linears: tuple[DequantizedLinear, ...]
    source_digests: dict[str, str]
    output_digests: dict[str, str]
    faults: tuple[Fault, ...]


def verify_dequantized(
    source: StoredDraft,
    folder: Path,
    dtype: FloatDtype,
    *,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> DequantizedReport:
    """Check every bit of a dequantized folder.

    Args:
        dtype: that its dequantized weights must have.
        config_file: its name in a staging folder, see `Checkpoint.open`.

    Raises:
        CheckpointError: `folder` is not a draft of the same family, or a file cannot be read.
    """
    output = Checkpoint.open(folder, config_file=config_file)
    read_draft(output)
    faults = _header_faults(source, output, dtype, config_file)
    if faults:  # nothing else can be compared
        return DequantizedReport(
            kept=0, linears=(), source_digests={}, output_digests={}, faults=tuple(faults)
        )
    by_size = sorted(source.draft.rows, key=lambda row: (-row.tensor.numel, row.tensor.name))
    compare = partial(_compare, source, output, dtype, algorithm)
    with ThreadPoolExecutor(WORKERS) as pool:
        names = (row.tensor.name for row in by_size)
        compared = dict(zip(names, pool.map(compare, by_size), strict=True))
    found = [compared[name] for name in sorted(compared)]
    scales = (tensor for _, _, tensor in source.cache_tensors)  # which plain weights have not
    dropped = {each.name: tensor_digest(source.checkpoint, each, algorithm) for each in scales}
    linears = tuple(one.linear for one in found if one.linear is not None)
    return DequantizedReport(
        kept=len(found) - len(linears),
        linears=linears,
        source_digests=_merged((*(one.source_digests for one in found), dropped)),
        output_digests=_merged(one.output_digests for one in found),
        faults=tuple(fault for one in found for fault in one.faults),
    )


def row_blocks(row: Row) -> Iterator[range]:
    """Blocks of rows of a linear that bound the memory of decoding it."""
    rows, columns = row.tensor.shape
    step = max(8, _BLOCK // max(1, columns) // 8 * 8)  # whole words of transposed codes
    for first in range(0, rows, step):
        yield range(first, min(first + step, rows))


def _header_faults(
    source: StoredDraft, output: Checkpoint, dtype: FloatDtype, config_file: str
) -> list[Fault]:
    """Names, dtypes and shapes; config.json; index, metadata and side files."""
    faults = []
    expected = {
        row.tensor.name: (
            dtype if source.is_quantized(row) else row.tensor.dtype,
            row.tensor.shape,
        )
        for row in source.draft.rows
    }
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in output.tensors.values()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            wanted, got = str(expected.get(name)), str(found.get(name))
            faults.append(Fault(where=name, expected=wanted, got=got))
    config = {k: v for k, v in source.checkpoint.config.items() if k != "quantization_config"}
    if json.dumps(config) != json.dumps(output.config):  # text tells 1 from true and 1.0
        faults.append(
            Fault(where=CONFIG_FILE, expected="the source's, without its declaration", got="other")
        )
    return [
        *faults,
        *index_faults(output),
        *metadata_faults(source.checkpoint, output),
        *side_file_faults(source.checkpoint, output, without=QUANTIZED_ONLY),
        *unowned_faults(source.checkpoint, output, config_file=config_file, without=QUANTIZED_ONLY),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """One tensor of the output; hashes by tensor name, `linear` where it was dequantized."""

    source_digests: dict[str, str]
    output_digests: dict[str, str]
    linear: DequantizedLinear | None
    faults: list[Fault]


def _merged(hashes: Iterable[dict[str, str]]) -> dict[str, str]:
    return dict(sorted(item for one in hashes for item in one.items()))


def _compare(
    source: StoredDraft, output: Checkpoint, dtype: FloatDtype, algorithm: Algorithm, row: Row
) -> _Compared:
    if source.is_quantized(row):
        return _compare_linear(source, output, dtype, algorithm, row)
    kept = compare_kept(source.checkpoint, output, row.tensor, lambda _count: None, algorithm)
    return _Compared(
        source_digests=kept.source_digests,
        output_digests=kept.output_digests,
        linear=None,
        faults=kept.faults,
    )


def _compare_linear(
    source: StoredDraft, output: Checkpoint, dtype: FloatDtype, algorithm: Algorithm, row: Row
) -> _Compared:
    """The stored weight against a second decoding, and what rounding lost."""
    stored = output.tensors[row.tensor.name]
    linear = source.linear(row)
    digest, finiteness = Digest(algorithm), Finiteness(dtype, stored.shape)
    rounded, wrong, largest = 0, 0, 0.0
    for rows in row_blocks(row):
        product = linear.decoded(rows).dequantized()
        written = read_rows(output, stored, rows.start, rows.stop)
        digest.update(written.data)
        finiteness.look(written)
        wrong += int(np.count_nonzero(written != rounded_bytes(product, dtype)))
        values = floats(written, dtype).reshape(product.shape)
        lost, relative = _loss(values, product)
        rounded, largest = rounded + lost, max(largest, relative)
    faults = NotFinite.of(row.tensor.name, finiteness.problem)
    if wrong:
        expected, got = f"code * scale rounded to {dtype}", f"{wrong} other byte(s)"
        faults.append(Fault(where=row.tensor.name, expected=expected, got=got))
    finding = DequantizedLinear(
        module=row.module,
        elements=math.prod(row.tensor.shape),
        rounded=rounded,
        max_relative_difference=largest,
    )
    digest_of = partial(tensor_digest, source.checkpoint, algorithm=algorithm)
    return _Compared(
        source_digests={part.name: digest_of(part) for part in source.parts(row).values()},
        output_digests={row.tensor.name: str(digest)},
        linear=finding,
        faults=faults,
    )


def _loss(values: Floats, product: Floats) -> tuple[int, float]:
    """How many values differ from the product, and the largest relative difference."""
    different = np.flatnonzero(values != product)
    if not len(different):
        return 0, 0.0
    exact = product.reshape(-1)[different].astype(np.float64)
    error = np.abs(values.reshape(-1)[different] - exact)
    return len(different), float((error / np.abs(exact)).max())


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
        found = list(
            pool.map(
                partial(_transcoded_verification_compare, source, output, rows, algorithm), by_size
            )
        )
    found.append(_compare_caches(source, output, algorithm))
    return TranscodedReport(
        scheme=str(output.scheme),
        source_digests=dict(sorted(item for one in found for item in one.source_digests.items())),
        output_digests=dict(sorted(item for one in found for item in one.output_digests.items())),
        faults=(*faults, *(fault for one in found for fault in one.faults)),
    )


@dataclass(slots=True, kw_only=True)
class _TranscodedVerificationCompared:
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


def _transcoded_verification_compare(
    source: StoredDraft,
    output: StoredDraft,
    rows: Mapping[str, Row],
    algorithm: Algorithm,
    row: Row,
) -> _TranscodedVerificationCompared:
    found = _TranscodedVerificationCompared()
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


def _compare_caches(
    source: StoredDraft, output: StoredDraft, algorithm: Algorithm
) -> _TranscodedVerificationCompared:
    """The KV caches that are declared: of one format, under the same scales."""
    found = _TranscodedVerificationCompared()
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
