"""Transcoded and dequantized folders against the quantized one that they were made from.

Transcoded: codes and scales are decoded as both folders declare them. Dequantized: weights are
decoded again and rounded by other means than those that wrote them. Imports no torch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..drafts import Row, read_draft
from ..drafts.draft_cache import UNIT
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, Finiteness, tensor_digest
from ..files.safetensors_header import FloatDtype
from ..stored.decoded_numbers import Floats, floats, read_rows, stored_scalar
from ..stored.layouts.scheme import INVERTED
from ..stored.linear import decoded_blocks
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft
from .changed_values import different_keys
from .comparison import (
    Compared,
    DequantizedLinear,
    Fault,
    NotFinite,
    RewrittenReport,
    compare_all,
    compare_kept,
    matched,
)
from .folder_faults import file_faults
from .scales import rounded_bytes


def verify_transcoded(
    source: StoredDraft,
    folder: Path,
    *,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> RewrittenReport:
    """Compare two quantized folders of one draft; CheckpointError where `folder` is no draft."""
    output = StoredDraft.read(Checkpoint.open(folder, config_file=config_file))
    before, after = source.checkpoint, output.checkpoint
    faults = different_keys(before.config, after.config)
    rounded = [side.scheme.activations for side in (source, output) if side.scheme is not None]
    if len(set(rounded)) > 1:
        where = f"{CONFIG_FILE}: activations"
        faults.append(Fault(where=where, expected=rounded[0], got=rounded[1]))
    faults += file_faults(before, after, output.scheme, config_file=config_file)
    rows = {row.tensor.name: row for row in output.draft.rows}
    if source.modules != output.modules or {r.tensor.name for r in source.draft.rows} != set(rows):
        got = ", ".join(sorted(source.modules ^ output.modules)) or "other tensors"
        faults.append(Fault(where=str(folder), expected="the same linears", got=got))
        return RewrittenReport(scheme=str(output.scheme), faults=tuple(faults))

    def compare(row: Row) -> Compared:
        if not source.is_quantized(row):
            return compare_kept(before, after, row.tensor, algorithm=algorithm)
        other = rows[row.tensor.name]
        found = Compared(faults=_code_faults(source, output, row, other))
        found.faults += _input_scale_faults(source, output, row.module)
        for side, own, digests in (
            (source, row, found.source_digests),
            (output, other, found.output_digests),
        ):
            for part in side.parts(own).values():
                digests[part.name] = tensor_digest(side.checkpoint, part, algorithm)
        return found

    caches = _compare_caches(source, output, algorithm)
    return _report(source, str(output.scheme), faults, compare, caches)


def verify_dequantized(
    source: StoredDraft,
    folder: Path,
    dtype: FloatDtype,
    *,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> RewrittenReport:
    """Check every bit of a dequantized folder, whose dequantized weights must be `dtype`."""
    output = Checkpoint.open(folder, config_file=config_file)
    read_draft(output)
    rows = source.draft.rows
    wanted = {
        row.tensor.name: replace(row.tensor, dtype=dtype)
        if source.is_quantized(row)
        else row.tensor
        for row in rows
    }
    _, faults = matched(wanted, output.tensors)
    config = {k: v for k, v in source.checkpoint.config.items() if k != "quantization_config"}
    faults += different_keys(config, output.config, but=())
    faults += file_faults(source.checkpoint, output, None, config_file=config_file)
    if faults:  # nothing else can be compared
        return RewrittenReport(faults=tuple(faults))

    def compare(row: Row) -> Compared:
        if not source.is_quantized(row):
            return compare_kept(source.checkpoint, output, row.tensor, algorithm=algorithm)
        return _compare_decoded(source, output, dtype, algorithm, row)

    digest = partial(tensor_digest, source.checkpoint, algorithm=algorithm)
    scales = (tensor for _, _, tensor in source.cache_tensors)  # which plain weights have not
    dropped = Compared(source_digests={tensor.name: digest(tensor) for tensor in scales})
    return _report(source, None, faults, compare, dropped)


def _report(
    source: StoredDraft,
    scheme: str | None,
    faults: list[Fault],
    compare: Callable[[Row], Compared],
    beside: Compared,
) -> RewrittenReport:
    rows = source.draft.rows
    found = compare_all((r.tensor.numel, r.tensor.name, partial(compare, r)) for r in rows)
    whole = Compared.joined((*found, beside))
    linears = tuple(one.dequantized for one in found if one.dequantized is not None)
    return RewrittenReport(
        scheme=scheme,
        kept=len(found) - len(linears),
        linears=linears,
        source_digests=dict(sorted(whole.source_digests.items())),
        output_digests=dict(sorted(whole.output_digests.items())),
        faults=(*faults, *whole.faults),
    )


def _compare_caches(source: StoredDraft, output: StoredDraft, algorithm: Algorithm) -> Compared:
    found = Compared()
    for side, digests in ((source, found.source_digests), (output, found.output_digests)):
        for _, _, tensor in side.cache_tensors:
            digests[tensor.name] = tensor_digest(side.checkpoint, tensor, algorithm)
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
    for rows in decoded_blocks(row.tensor):
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


def _compare_decoded(
    source: StoredDraft, output: Checkpoint, dtype: FloatDtype, algorithm: Algorithm, row: Row
) -> Compared:
    stored = output.tensors[row.tensor.name]
    linear = source.linear(row)
    digest, finiteness = Digest(algorithm), Finiteness(dtype, stored.shape)
    rounded, wrong, largest = 0, 0, 0.0
    for rows in decoded_blocks(row.tensor):
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
    parts = source.parts(row).values()
    return Compared(
        source_digests={p.name: tensor_digest(source.checkpoint, p, algorithm) for p in parts},
        output_digests={row.tensor.name: str(digest)},
        dequantized=DequantizedLinear(
            module=row.module,
            elements=math.prod(row.tensor.shape),
            rounded=rounded,
            max_relative_difference=largest,
        ),
        faults=faults,
    )


def _loss(values: Floats, product: Floats) -> tuple[int, float]:
    different = np.flatnonzero(values != product)
    if not len(different):
        return 0, 0.0
    exact = product.reshape(-1)[different].astype(np.float64)
    error = np.abs(values.reshape(-1)[different] - exact)
    return len(different), float((error / np.abs(exact)).max())
