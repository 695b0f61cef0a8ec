"""`audit`: what a quantized draft folder is, and which faults show without its source.

Works on anybody's folder. Shares the decoder and the rules of `verify`; does not import torch.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError
from ...recipes.schema import QUANTIZABLE
from ..drafts import Draft, Row
from ..drafts.draft_cache import CacheScales
from ..drafts.recognition import is_speculators
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.provenance import CutProvenance, QuantizedProvenance, TranscodedProvenance
from ..files.provenance_file import read_provenance
from ..files.safetensors_header import WORKERS, TensorInfo
from ..stored.decoded_numbers import E2M1, E4M3, Bytes, Floats, stored_scalar
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.linear import StoredLinear, decoded_blocks
from ..stored.stored_declaration import (
    INPUT_SCALES,
    beside_codes,
    declared_scheme,
    raw_declaration,
    stored_parts,
)
from ..stored.stored_draft import StoredDraft, cache_scales
from .changed_values import cache_scale_faults
from .comparison import Fault, form, others
from .folder_faults import exclude_faults, fused_faults, index_faults, not_quantizable, sort_parts
from .scales import companion_faults, group_absmax

_TOP_UNDER_POWERS = 4.0
"""The least code of the largest weight under an absmax scale; powers of two give it 4 or 6.

Other scales give it the largest code of the format: 7 or -8 for absmax / 7.5, 7 for absmax / 7.
Rounding the scale to BF16, F16 or F8_E4M3 does not move the largest weight out of its
last step.
"""
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeStatistics:
    """The codes and scales of one linear; shares lie in [0, 1].

    Attributes:
        num_scales: stored scales, without the one over NVFP4's group scales.
        smallest_scale, largest_scale: of the finite scales, as multipliers of the codes.
        saturated: share of the codes at an end of the range that is symmetric about its middle.
        zero_halves: the zeros of both halves of a concat input; None for other linears.
        distinct: values that occur. possible: values of the format, +0 and -0 being one.
        scales_fit: share of the scales whose largest code is at least that of absmax, among scales
            with a code that is not zero; None if there are none. Below 1, codes are wasted.
    """

    num_scales: int
    smallest_scale: float | None
    largest_scale: float | None
    saturated: float
    zero: float
    zero_halves: tuple[float, float] | None
    distinct: int
    possible: int
    scales_fit: float | None


def code_statistics(
    checkpoint: Checkpoint, scheme: DeclaredScheme, row: Row, *, concat: bool, ours: bool
) -> tuple[CodeStatistics, list[Fault]]:
    """Check every code and scale of a linear whose stored tensors were checked by header.

    Faults: scales that are not positive or are subnormal; NaN codes; less than half a range used.
    """
    module = row.module
    with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
        linear = StoredLinear(checkpoint, scheme, module, in_features=row.tensor.shape[1])
        codes = _Codes(scheme, row.tensor.shape)
        for rows in decoded_blocks(row.tensor):
            codes.add(rows, linear, linear.bytes_of(rows))
        per_scale = {"tensor": len(codes.peaks), "block": scheme.rows_of_scale}
        first_rows = np.arange(0, len(codes.peaks), per_scale.get(scheme.granularity, 1))
        peaks: Floats = np.maximum.reduceat(codes.peaks, first_rows, axis=0)
    scale = linear.scale[:: scheme.rows_of_scale]
    stored = checkpoint.tensors[f"{module}.{scheme.layout.scale_suffix(scheme)}"]
    size = np.abs(scale) if scheme.has_signed_scales and not ours else scale
    faults = _scale_faults(stored, size, peaks) + codes.faults(linear.codes_tensor.name)
    return codes.statistics(scale, peaks, concat=concat), faults


class _Codes:
    """The codes of one linear, counted over blocks of rows.

    `peaks` are the largest magnitudes under each scale of a row, [out_features, groups].
    """

    def __init__(self, scheme: DeclaredScheme, shape: tuple[int, ...]) -> None:
        self._number = scheme.number
        self._in_features = shape[1]
        self._group = scheme.group_size or shape[1]
        half = 2 ** (scheme.number.bits - 1)
        self._values: Floats = E4M3 if scheme.number.is_fp8 else E2M1
        if scheme.number.is_integer:
            self._values = np.arange(-half, half, dtype=np.float32)
        fp4 = scheme.number.is_fp4  # all from -6 to 6 are halves
        self._bins = np.linspace(-6, 6, 25, dtype=np.float32) if fp4 else self._values
        self._counts: Counts = np.zeros(len(self._bins), np.int64)
        self._zeros: Counts = np.zeros(2, np.int64)
        self._first_nan: tuple[int, int] | None = None
        self.peaks: Floats = np.zeros((shape[0], -(-shape[1] // self._group)), np.float32)

    def add(self, rows: range, linear: StoredLinear, stored: Bytes) -> None:
        codes = linear.levels(rows, stored)
        if self._number.is_fp8:
            index = stored
        else:
            step = np.float32(2 if self._number.is_fp4 else 1)
            index = ((codes - self._bins[0]) * step).astype(np.uint8).reshape(-1)
        self._counts += np.bincount(index, minlength=len(self._bins))
        half = self._in_features // 2
        self._zeros += [np.count_nonzero(part == 0) for part in (codes[:, :half], codes[:, half:])]
        by_group = codes if linear.order is None else codes[:, linear.order]
        bits = group_absmax(by_group.view(np.uint32), self._group)
        peaks = self.peaks[rows.start : rows.stop] = bits.view(np.float32)
        if self._first_nan is None and np.isnan(peaks).any():
            row, column = map(int, np.argwhere(np.isnan(codes))[0])
            self._first_nan = rows.start + row, column

    def faults(self, name: str) -> list[Fault]:
        if self._first_nan is not None:
            number, (row, column) = int(self._counts[np.isnan(self._bins)].sum()), self._first_nan
            got = f"{number} NaN(s), first at row {row}, column {column}"
            return [Fault(name, "quantized values that are numbers", got)]
        # With codes twice as large, scales half as large would hold the same weights exactly; no
        # rule chooses worse scales. FP8 loses nothing by them.
        largest, peak = float(np.nanmax(self._values)), float(self.peaks.max())
        if self._number.is_fp8 or not 0 < peak <= largest / 2:
            return []
        expected = f"codes up to {largest:g}, the end of the range, or near it"
        return [Fault(name, expected, f"none beyond {peak:g} in the whole matrix")]

    def statistics(self, scale: Floats, peaks: Floats, *, concat: bool) -> CodeStatistics:
        """The figures; `peaks` has the shape of `scale`."""
        counts, bins, possible = self._counts, self._bins, self._values[~np.isnan(self._values)]
        total = int(counts.sum())
        ends = (bins == possible.min()) | (bins == possible.max())
        first, second = map(float, self._zeros / (total / 2))
        finite = scale[np.isfinite(scale)]
        used = peaks != 0
        top = _TOP_UNDER_POWERS if self._number.powers_of_two else self._number.largest
        return CodeStatistics(
            num_scales=scale.size,
            smallest_scale=float(finite.min()) if finite.size else None,
            largest_scale=float(finite.max()) if finite.size else None,
            saturated=int(counts[ends].sum()) / total,
            zero=int(self._zeros.sum()) / total,
            zero_halves=(first, second) if concat else None,
            distinct=len(np.unique(bins[(counts > 0) & ~np.isnan(bins)])),
            possible=len(np.unique(possible)),
            scales_fit=float((peaks[used] >= top).mean()) if used.any() else None,
        )


def _scale_faults(tensor: TensorInfo, scale: Floats, peaks: Floats) -> list[Fault]:
    """Scales that no engine can multiply codes with, or that some engines flush to zero."""
    bad = ~(np.isfinite(scale) & (scale > 0))
    # E8M0 is read as a float32; F8_E4M3 is multiplied by a float32 scale.
    smallest = np.finfo(np.float16 if tensor.dtype == "F16" else np.float32).tiny
    subnormal = ~bad & (scale < smallest) & (peaks != 0)
    normal = f"normal numbers, >= {smallest:.3g}, over codes that are not all zero"

    def say(at: tuple[int, ...]) -> str:
        group = f", group {at[1]}" if scale.shape[1] > 1 else ""
        return f"first {scale[at]} at row {at[0]}{group}"

    faults = others(tensor.name, "finite scales > 0", bad, say)
    return faults + others(tensor.name, normal, subnormal, say)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAudit:
    """One linear that is stored quantized, with `shape` (out_features, in_features).

    Attributes:
        complete: every stored tensor has the declared form.
        codes: None where codes or scales are missing or wrong, or nothing says how to decode them.
        input_scale: static scale of its input as stored (compressed-tensors' NVFP4: a divisor).
    """

    module: str
    role: str
    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    complete: bool
    codes: CodeStatistics | None
    input_scale: float | None

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found in one quantized folder.

    `draft` has every quantized linear as one row of its unquantized shape, whose dtype and byte
    range mean nothing. An audit without faults does not show that the codes come from any source.
    """

    checkpoint: Checkpoint
    draft: Draft
    scheme: DeclaredScheme | None
    made_by: tuple[str, ...]
    linears: tuple[LinearAudit, ...]
    faults: tuple[Fault, ...]
    cache: Mapping[int, CacheScales]

    @property
    def quantized_bytes(self) -> int:
        """Stored bytes of the quantized linears."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight of the quantized linears; None if there are none."""
        weights = sum(linear.shape[0] * linear.shape[1] for linear in self.linears)
        return 8 * self.quantized_bytes / weights if weights else None

    def to_mapping(self) -> dict[str, Any]:
        """The audit as JSON values."""
        declared = self.checkpoint.config.get("architectures") or [None]
        cache = {layer: dataclasses.asdict(scales) for layer, scales in self.cache.items()}
        return {
            **({"kv_cache": cache} if cache else {}),
            "draft": str(self.checkpoint.folder),
            "family": self.draft.family.name,
            "architecture": declared[0],
            "speculators_layout": is_speculators(self.checkpoint.config),
            "num_layers": self.draft.geometry.num_layers,
            "quantized": True,
            "scheme": str(self.scheme) if self.scheme else None,
            "declared": self.scheme.to_mapping() if self.scheme else None,
            "made_by": list(self.made_by),
            "bytes": self.checkpoint.nbytes,
            "quantized_bytes": self.quantized_bytes,
            "bits_per_weight": self.bits_per_weight,
            "linears": [_linear_mapping(linear) for linear in self.linears],
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
        }


def audit_checkpoint(checkpoint: Checkpoint) -> Audit:
    """Check every quantized linear of a folder, and what the folder declares.

    CheckpointError where it is not a draft, VerifyError where its declaration is not understood.
    """
    scheme = declared_scheme(checkpoint)
    stored = StoredDraft.look(checkpoint, scheme)
    draft, looking = stored.draft, stored.modules
    rows = [row for row in draft.linears() if row.module in looking]
    concat = frozenset(row.canonical for row in draft.concat_linears())
    biases = frozenset(row.tensor.name for row in draft.rows if row.tensor.name.endswith(".bias"))
    with ThreadPoolExecutor(WORKERS) as pool:
        looked = list(pool.map(partial(_look, checkpoint, scheme, concat, biases), rows))
    linears = tuple(linear for linear, _ in looked)
    quantized = frozenset(linear.module for linear in linears)
    only = f"only linears of {draft.family.name} to be quantized"
    strange = [Fault(m, only, "tensors of a quantized linear") for m in sorted(looking - quantized)]
    bad_scales = cache_scale_faults(draft, checkpoint, scheme, None)
    return Audit(
        checkpoint=checkpoint,
        draft=draft,
        scheme=scheme,
        made_by=_made_by(checkpoint),
        linears=linears,
        faults=(
            *_declaration_faults(checkpoint, draft, scheme, linears),
            *strange,
            *(fault for _, faults in looked for fault in faults),
            *index_faults(checkpoint),
            *bad_scales,
        ),
        cache={} if bad_scales else cache_scales(checkpoint, draft, scheme),
    )


def _look(
    checkpoint: Checkpoint,
    scheme: DeclaredScheme | None,
    concat: Collection[str],
    biases: Collection[str],
    row: Row,
) -> tuple[LinearAudit, list[Fault]]:
    module = row.module
    tensors = {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.rpartition(".")[0] == module and name not in biases
    }
    faults = [] if row.role in QUANTIZABLE else [not_quantizable(module, row)]
    codes = input_scale = None
    wrong: set[str] = set()
    module_scheme = scheme.of(module) if scheme is not None else None
    if scheme is not None and module_scheme is None:
        where = f"{CONFIG_FILE}: quantization_config, {module}"
        faults.append(Fault(where, "a group that targets it", "none"))
    if module_scheme is not None:
        rows, columns = row.tensor.shape
        parts = stored_parts(module_scheme, rows, columns)
        right, part_faults = sort_parts(checkpoint, module, parts, module_scheme)
        wrong = {fault.where.removeprefix(f"{module}.") for fault in part_faults}
        faults += part_faults
        beyond = [tensors[suffix] for suffix in sorted(tensors.keys() - parts.keys())]
        faults += [Fault(tensor.name, "no such tensor", form(tensor)) for tensor in beyond]
        ours = isinstance(read_provenance(checkpoint.folder), QuantizedProvenance)
        faults += companion_faults(checkpoint, module_scheme, row.tensor, right, symmetric=ours)
        if wrong <= beside_codes(module_scheme):
            try:
                codes, more = code_statistics(
                    checkpoint, module_scheme, row, concat=row.canonical in concat, ours=ours
                )
            except CheckpointError as exc:
                more = [Fault(module, "what is declared", exc.what)]
            faults += more
        static = [tensor for suffix, tensor in right.items() if suffix in INPUT_SCALES]
        input_scale = stored_scalar(checkpoint, static[0]) if static else None
    linear = LinearAudit(
        module=module, role=row.role, shape=row.tensor.shape, tensors=tuple(tensors.values()),
        complete=not wrong, codes=codes, input_scale=input_scale,
    )  # fmt: skip
    return linear, faults


def _declaration_faults(
    checkpoint: Checkpoint,
    draft: Draft,
    scheme: DeclaredScheme | None,
    linears: Sequence[LinearAudit],
) -> list[Fault]:
    where = f"{CONFIG_FILE}: quantization_config"
    if scheme is None:
        if not linears:
            return []
        suffixes = sorted({t.name.rpartition(".")[2] for lin in linears for t in lin.tensors})
        without = "engines ignore the quantized values or read them as floats"
        got = f"none, but {len(linears)} linears stored as {', '.join(suffixes)}"
        return [Fault(where, f"a declaration, without which {without}", got)]
    if not linears and checkpoint.subtree is None:
        return [Fault(where, f"linears stored as {scheme}", "none of them")]
    quantized = frozenset(linear.module for linear in linears)
    complete = frozenset(linear.module for linear in linears if linear.complete)
    # What engines call a layer inside its target is their matter: `engines/linear_findings.py`.
    asked = checkpoint.subtree is None
    return [
        *(exclude_faults(draft, scheme, quantized, all_listed=False) if asked else ()),
        *fused_faults(draft, checkpoint, scheme, quantized, complete),
    ]


def _made_by(checkpoint: Checkpoint) -> tuple[str, ...]:
    makers = []
    recorded = read_provenance(checkpoint.folder)
    if recorded is not None:
        by, origin = f"draftquant {recorded.draftquant}", recorded.source.hub_id or "a folder"
        if isinstance(recorded, TranscodedProvenance):
            makers.append(f"something else, transcoded by {by}")
        elif isinstance(recorded, QuantizedProvenance):
            corrected = recorded.recipe.algorithm.input_correction == "auto"
            marks = ", with input correction" if corrected else ""
            marks += "".join(f", {cut} cut before" for cut in recorded.cuts[-1:])
            makers.append(f"{_quantized_by(recorded)}, from {origin}{marks}")
        elif isinstance(recorded, CutProvenance):
            first, was = recorded.quantized_by, ""
            if isinstance(first, QuantizedProvenance):
                was = f", after {_quantized_by(first)}"
            makers.append(f"{by}, {recorded.cut}, from {origin}{was}")
        else:
            makers.append(f"{by}, dequantized from {origin}")
    raw = raw_declaration(checkpoint)
    if raw is not None and isinstance(raw.value, dict):
        if "version" in raw.value:
            makers.append(f"{raw.value.get('quant_method')} {raw.value['version']}")
        producer = raw.value.get("producer")
        if isinstance(producer, dict) and producer:
            makers.append(f"{producer.get('name')} {producer.get('version', '')}".strip())
    return tuple(makers)


def _quantized_by(record: QuantizedProvenance) -> str:
    return f"draftquant {record.draftquant}, recipe {record.recipe.name}"


def _linear_mapping(linear: LinearAudit) -> dict[str, Any]:
    scale = linear.input_scale
    return {
        "module": linear.module,
        "role": linear.role,
        "shape": linear.shape,
        "bytes": linear.nbytes,
        "bits_per_weight": linear.bits_per_weight,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes}
            for t in linear.tensors
        ],
        "codes": dataclasses.asdict(linear.codes) if linear.codes else None,
        # JSON has no infinity.
        "input_scale": scale if scale is not None and math.isfinite(scale) else None,
    }
