"""Transcoded and dequantized folders against the quantized one that they were made from.

Transcoded: codes and scales are decoded as both folders declare them. Dequantized: weights are
decoded again and rounded by code that the writer does not use. Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..drafts import Row, read_draft
from ..drafts.draft_cache import UNIT
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import Digest, tensor_digest
from ..files.finiteness import Finiteness
from ..files.safetensors_header import FloatDtype, TensorInfo
from ..stored.decoded_numbers import Floats, floats, read_rows, stored_scalar
from ..stored.layouts.scheme import INVERTED
from ..stored.linear import DecodedWeight, decoded_blocks
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft
from .changed_values import different_keys
from .comparison import (
    Compared,
    DequantizedLinear,
    Fault,
    NotFinite,
    Sides,
    compare_all,
    compare_kept,
    matched,
)
from .folder_faults import file_faults
from .scales import rounded_bytes


def verify_transcoded(
    source: StoredDraft, folder: Path, *, config_file: str = CONFIG_FILE
) -> Compared:
    """Compare two quantized folders of one draft; CheckpointError where `folder` is no draft."""
    output = StoredDraft.read(Checkpoint.open(folder, config_file=config_file))
    before, after = source.checkpoint, output.checkpoint
    faults = different_keys(before.config, after.config)
    whole = Compared(scheme=str(output.scheme), faults=faults)
    rounded = [side.scheme.activations for side in (source, output) if side.scheme is not None]
    if len(set(rounded)) > 1:
        whole.faults.append(Fault(f"{CONFIG_FILE}: activations", rounded[0], rounded[1]))
    whole.faults += file_faults(before, after, output.scheme)
    both = [{row.tensor.name: row for row in side.draft.rows} for side in (source, output)]
    if source.modules != output.modules or both[0].keys() != both[1].keys():
        got = ", ".join(sorted(source.modules ^ output.modules)) or "other tensors"
        whole.faults.append(Fault(str(folder), "the same linears", got))
        return whole

    def compare(tensor: TensorInfo) -> Compared:
        row, other = (rows[tensor.name] for rows in both)
        if not source.is_quantized(row):
            return compare_kept(Sides(before, after), tensor)
        compared = Compared(faults=_code_faults(source, output, row, other))
        compared.faults += _input_scale_faults(source, output, row.module)
        compared.source_digests = _digests(source, source.parts(row).values())
        compared.output_digests = _digests(output, output.parts(other).values())
        return compared

    whole.add(compare_all((row.tensor for row in source.draft.rows), compare))
    whole.add(_compare_caches(source, output))
    return replace(whole, **whole.digests)


def verify_dequantized(
    source: StoredDraft, folder: Path, dtype: FloatDtype, *, config_file: str = CONFIG_FILE
) -> Compared:
    """Check every bit of a dequantized folder, whose dequantized weights must be `dtype`."""
    output = Checkpoint.open(folder, config_file=config_file)
    read_draft(output)
    before, rows = source.checkpoint, {row.tensor.name: row for row in source.draft.rows}
    wanted = {
        name: replace(row.tensor, dtype=dtype) if source.is_quantized(row) else row.tensor
        for name, row in rows.items()
    }
    tensors, faults = matched(wanted, output.tensors)
    config = {k: v for k, v in before.config.items() if k != "quantization_config"}
    faults += different_keys(config, output.config, but=())
    faults += file_faults(before, output, None)
    if faults:  # nothing else can be compared
        return Compared(faults=faults)

    def compare(tensor: TensorInfo) -> Compared:
        if not source.is_quantized(rows[tensor.name]):
            return compare_kept(Sides(before, output), tensor)
        return _compare_decoded(source, output, dtype, rows[tensor.name])

    whole = compare_all(tensors, compare)
    scales = (tensor for _, _, tensor in source.cache_tensors)  # plain weights have none
    whole.source_digests |= _digests(source, scales)
    return replace(whole, **whole.digests)


def _digests(side: StoredDraft, tensors: Iterable[TensorInfo]) -> dict[str, str]:
    return {tensor.name: tensor_digest(side.checkpoint, tensor) for tensor in tensors}


def _compare_caches(source: StoredDraft, output: StoredDraft) -> Compared:
    compared = Compared(
        source_digests=_digests(source, (tensor for _, _, tensor in source.cache_tensors)),
        output_digests=_digests(output, (tensor for _, _, tensor in output.cache_tensors)),
    )
    layers = range(source.draft.geometry.num_layers)
    before, after = (
        cache and (cache.dtype, [cache.scales.get(layer, UNIT) for layer in layers])
        for cache in (source.kv_cache(), output.kv_cache())
    )
    if before != after:
        compared.faults.append(Fault(f"{CONFIG_FILE}: KV cache", f"{before}", f"{after}"))
    return compared


def _code_faults(source: StoredDraft, output: StoredDraft, row: Row, other: Row) -> list[Fault]:
    """Codes and their multipliers, bit for bit: even a -0 is not a 0."""
    before, after = source.linear(row), output.linear(other)
    finiteness, codes, scales = Finiteness("F32", row.tensor.shape), 0, 0
    for rows in decoded_blocks(row.tensor):
        a, b = before.decoded(rows), after.decoded(rows)
        finiteness.look(np.ascontiguousarray(a.codes))
        codes += int(np.count_nonzero(a.codes.view(np.uint32) != b.codes.view(np.uint32)))
        scales += _other_scales(a, b)
    named = {"the source's quantized values": codes, "the source's scales": scales}
    others = (Fault(row.module, what, f"{n} other(s)") for what, n in named.items() if n)
    return [*NotFinite.of(row.tensor.name, finiteness.problem), *others]


def _other_scales(before: DecodedWeight, after: DecodedWeight) -> int:
    """How many differ; groups may be parts of the source's, and of zeros have any scale."""
    size, part = before.group_size or 0, after.group_size or 0
    parts, rest = divmod(size, part) if part else (1, size)
    wanted = np.repeat(before.scale, max(1, parts), axis=1)
    if rest or wanted.shape != after.scale.shape:
        return wanted.size
    different = wanted != after.scale
    if parts > 1:
        different &= after.codes.reshape(*wanted.shape, -1).any(axis=-1)
    return int(np.count_nonzero(different))


def _input_scale_faults(source: StoredDraft, output: StoredDraft, module: str) -> list[Fault]:
    a, b = (_input_scale(side, module) for side in (source, output))
    if a == b:
        bad = None if a is None or np.isfinite(a) else f"{a}"
        return NotFinite.of(f"{module}: input scale", bad)
    return [Fault(f"{module}: input scale", f"{a}", f"{b}")]


def _input_scale(side: StoredDraft, module: str) -> np.float32 | None:
    """Kernels multiply inputs by the inverse of NVFP4's scale, which only some layouts store."""
    scheme = side.scheme.of(module) if side.scheme else None
    for suffix in INPUT_SCALES:
        tensor = side.checkpoint.tensors.get(f"{module}.{suffix}")
        if tensor is not None and scheme is not None:
            value = np.float32(stored_scalar(side.checkpoint, tensor))
            inverted = scheme.activations in INVERTED and suffix != INVERSE_INPUT_SCALE
            return np.float32(1) / value if inverted else value
    return None


def _compare_decoded(
    source: StoredDraft, output: Checkpoint, dtype: FloatDtype, row: Row
) -> Compared:
    stored = output.tensors[row.tensor.name]
    linear = source.linear(row)
    digest, finiteness = Digest(), Finiteness(dtype, stored.shape)
    rounded, wrong, largest = 0, 0, 0.0
    for rows in decoded_blocks(row.tensor):
        product = linear.decoded(rows).dequantized()
        written = read_rows(output, stored, rows.start, rows.stop)
        digest.update(written.data)
        finiteness.look(written)
        wrong += int(np.count_nonzero(written != rounded_bytes(product, dtype)))
        count, relative = _loss(floats(written, dtype).reshape(product.shape), product)
        rounded, largest = rounded + count, max(largest, relative)
    faults = NotFinite.of(row.tensor.name, finiteness.problem)
    if wrong:
        expected, got = f"code * scale rounded to {dtype}", f"{wrong} other byte(s)"
        faults.append(Fault(row.tensor.name, expected, got))
    lost = DequantizedLinear(
        module=row.module, elements=row.tensor.numel, rounded=rounded,
        max_relative_difference=largest,
    )  # fmt: skip
    return Compared(
        source_digests=_digests(source, source.parts(row).values()),
        output_digests={row.tensor.name: str(digest)},
        dequantized=[lost],
        faults=faults,
    )


def _loss(values: Floats, product: Floats) -> tuple[int, float]:
    different = np.flatnonzero(values != product)
    if not len(different):
        return 0, 0.0
    exact = product.reshape(-1)[different].astype(np.float64)
    error = np.abs(values.reshape(-1)[different] - exact)
    return len(different), float((error / np.abs(exact)).max())
