"""Re-reading a dequantized folder against the quantized one that it was made from.

Every weight is decoded again and rounded by other means than those that wrote it (integer
arithmetic for BF16, numpy for F16), then compared bit by bit. Imports no torch.
"""

import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..drafts import Row, read_draft
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, tensor_digest
from ..files.finiteness import Finiteness
from ..files.safetensors_header import FloatDtype
from ..files.workers import WORKERS
from ..stored.decoded_numbers import Floats, floats, read_rows
from ..stored.stored_draft import StoredDraft
from .headers import index_faults, metadata_faults
from .kept_tensors import compare_kept
from .rounded_values import rounded_bytes
from .unowned_files import QUANTIZED_ONLY, side_file_faults, unowned_faults
from .verify_report import Fault, NotFinite

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
