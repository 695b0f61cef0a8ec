"""`audit`: what a quantized draft folder is, and what is wrong with it that shows without a source.

Anybody's folder, also one that this package did not make. It shares the decoder and the rules of
`verify`, but nothing with the side that writes. It does not import torch.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...recipes.roles import QUANTIZABLE
from ..drafts import Draft, Row
from ..drafts.kv_cache import CacheScales
from ..drafts.speculators_layout import is_speculators
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.provenance import CutProvenance, QuantizedProvenance, TranscodedProvenance
from ..files.provenance_file import read_provenance
from ..files.safetensors_header import TensorInfo
from ..files.workers import WORKERS
from ..stored.declarations import DeclaredScheme, declared_scheme, raw_declaration
from ..stored.decoded_numbers import stored_scalar
from ..stored.kv_cache import cache_scales
from ..stored.parts import INPUT_SCALES, beside_codes, stored_parts
from ..stored.stored_draft import StoredDraft
from .cache_scale_faults import cache_scale_faults
from .exclude_list_faults import exclude_faults
from .headers import (
    form,
    fused_faults,
    index_faults,
    must_not_be_quantized,
    wrong_parts,
)
from .scales import companion_faults
from .statistics import CodeStatistics, code_statistics
from .verify_report import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAudit:
    """One linear that is stored quantized.

    Attributes:
        module: on-disk name.
        shape: unquantized: out_features, in_features.
        tensors: everything stored under its name.
        codes: None where codes or scales are absent or wrong, or nothing says how to decode them.
        input_scale: static scale of its input as stored (compressed-tensors' NVFP4: a divisor).
    """

    module: str
    role: str
    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
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

    Attributes:
        checkpoint: the folder.
        draft: the draft of plain weights that it stands for: every quantized linear is one row of
            its unquantized shape, whose dtype and byte range mean nothing.
        scheme: what it declares; None where it declares nothing.
        made_by: who made it, by its own word.
        linears: those stored quantized, by name.
        faults: what is wrong; empty does not mean that the codes are those of any source.
        cache: the scales of its KV cache, by number of the layer.
    """

    checkpoint: Checkpoint
    draft: Draft
    scheme: DeclaredScheme | None
    made_by: tuple[str, ...]
    linears: tuple[LinearAudit, ...]
    faults: tuple[Fault, ...]
    cache: Mapping[int, CacheScales] = field(default_factory=dict)

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


def audit(checkpoint: Checkpoint) -> Audit:
    """Look at every quantized linear of a folder and at what it declares.

    Raises:
        CheckpointError: apart from its quantized linears, the folder is not a draft.
        VerifyError: its declaration is not understood.
    """
    scheme = declared_scheme(checkpoint)
    stored = StoredDraft.look(checkpoint, scheme)
    draft, looking = stored.draft, stored.modules
    rows = [row for row in draft.linears() if row.module in looking]
    concat = frozenset(row.canonical for row in draft.concat_linears())
    with ThreadPoolExecutor(WORKERS) as pool:
        looked = list(pool.map(partial(_look, checkpoint, scheme, concat), rows))
    linears = tuple(found.linear for found in looked)
    quantized = frozenset(linear.module for linear in linears)
    complete = frozenset(found.linear.module for found in looked if found.complete)
    bad_scales = cache_scale_faults(draft, checkpoint, scheme, None)
    return Audit(
        checkpoint=checkpoint,
        draft=draft,
        scheme=scheme,
        made_by=_made_by(checkpoint),
        linears=linears,
        faults=(
            *_declaration_faults(checkpoint, draft, scheme, linears, complete),
            *(_no_linear(draft, module) for module in sorted(looking - quantized)),
            *(fault for found in looked for fault in found.faults),
            *index_faults(checkpoint),
            *bad_scales,
        ),
        cache={} if bad_scales else cache_scales(checkpoint, draft, scheme),
    )


class _Looked(NamedTuple):
    """One linear; `complete` if every stored tensor has the form that is declared."""

    linear: LinearAudit
    faults: list[Fault]
    complete: bool


def _look(
    checkpoint: Checkpoint, scheme: DeclaredScheme | None, concat: Collection[str], row: Row
) -> _Looked:
    """Headers, codes, scales and companions of one linear."""
    module = row.module
    tensors = {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.rpartition(".")[0] == module
    }
    faults = [] if row.role in QUANTIZABLE else [must_not_be_quantized(module, row)]
    codes = input_scale = None
    wrong: set[str] = set()
    own = scheme.of(module) if scheme is not None else None
    if scheme is not None and own is None:
        where = f"{CONFIG_FILE}: quantization_config, {module}"
        faults.append(Fault(where=where, expected="a group that targets it", got="none"))
    if own is not None:
        rows, columns = row.tensor.shape
        parts = stored_parts(own, rows, columns)
        found = wrong_parts(module, parts, {s: tensors.get(s) for s in parts}, own)
        wrong = {fault.where.removeprefix(f"{module}.") for fault in found}
        faults += found + [
            _too_much(tensors[suffix]) for suffix in sorted(tensors.keys() - parts.keys())
        ]
        right = {suffix: tensors[suffix] for suffix in parts if suffix in tensors.keys() - wrong}
        ours = isinstance(read_provenance(checkpoint.folder), QuantizedProvenance)
        faults += companion_faults(checkpoint, own, row.tensor, right, symmetric=ours)
        if wrong <= beside_codes(own):
            try:
                codes, more = code_statistics(
                    checkpoint, own, row, concat=row.canonical in concat, ours=ours
                )
            except CheckpointError as exc:
                more = [Fault(where=module, expected="what is declared", got=exc.what)]
            faults += more
        static = [tensor for suffix, tensor in right.items() if suffix in INPUT_SCALES]
        input_scale = stored_scalar(checkpoint, static[0]) if static else None
    linear = LinearAudit(
        module=module,
        role=row.role,
        shape=row.tensor.shape,
        tensors=tuple(tensors.values()),
        codes=codes,
        input_scale=input_scale,
    )
    return _Looked(linear=linear, faults=faults, complete=not wrong)


def _declaration_faults(
    checkpoint: Checkpoint,
    draft: Draft,
    scheme: DeclaredScheme | None,
    linears: Sequence[LinearAudit],
    complete: frozenset[str],
) -> list[Fault]:
    """What is declared against what is stored, module by module."""
    where = f"{CONFIG_FILE}: quantization_config"
    if scheme is None:
        if not linears:
            return []
        suffixes = sorted({t.name.rpartition(".")[2] for lin in linears for t in lin.tensors})
        got = f"none, but {len(linears)} linears stored as {', '.join(suffixes)}"
        expected = (
            "a declaration, without which engines ignore the quantized values or read"
            " them as floats"
        )
        return [Fault(where=where, expected=expected, got=got)]
    if not linears and checkpoint.subtree is None:
        return [Fault(where=where, expected=f"linears stored as {scheme}", got="none of them")]
    quantized = frozenset(linear.module for linear in linears)
    # How engines know a layer inside its target is theirs to say: `engines/exclude_mismatches.py`.
    asked = checkpoint.subtree is None
    return [
        *(exclude_faults(draft, scheme, quantized, all_listed=False) if asked else ()),
        *fused_faults(draft, checkpoint, scheme, quantized, complete),
    ]


def _no_linear(draft: Draft, module: str) -> Fault:
    expected = f"only linears of {draft.family.name} to be quantized"
    return Fault(where=module, expected=expected, got="tensors of a quantized linear")


def _too_much(tensor: TensorInfo) -> Fault:
    return Fault(where=tensor.name, expected="no such tensor", got=form(tensor))


def _made_by(checkpoint: Checkpoint) -> tuple[str, ...]:
    """draftquant.json, and the version and producer keys of the declaration."""
    found = []
    recorded = read_provenance(checkpoint.folder)
    if recorded is not None:
        by, origin = f"draftquant {recorded.draftquant}", recorded.source.hub_id or "a folder"
        if isinstance(recorded, TranscodedProvenance):
            found.append(f"something else, transcoded by {by}")
        elif isinstance(recorded, QuantizedProvenance):
            found.append(f"{_quantized_by(recorded)}, from {origin}{_marks(recorded)}")
        elif isinstance(recorded, CutProvenance):
            first = recorded.quantized_by
            was = (
                f", after {_quantized_by(first)}" if isinstance(first, QuantizedProvenance) else ""
            )
            found.append(f"{by}, {recorded.cut}, from {origin}{was}")
        else:
            found.append(f"{by}, dequantized from {origin}")
    raw = raw_declaration(checkpoint)
    if raw is not None and isinstance(raw.value, dict):
        if "version" in raw.value:
            found.append(f"{raw.value.get('quant_method')} {raw.value['version']}")
        producer = _section(raw.value, "producer")
        if producer:
            found.append(f"{producer.get('name')} {producer.get('version', '')}".strip())
    return tuple(found)


def _quantized_by(record: QuantizedProvenance) -> str:
    return f"draftquant {record.draftquant}, recipe {record.recipe.name}"


def _marks(record: QuantizedProvenance) -> str:
    """What was done to the draft beside quantizing it."""
    corrected = record.recipe.algorithm.input_correction == "auto"
    correction = ", with input correction" if corrected else ""
    return correction + "".join(f", {cut} cut before" for cut in record.cuts[-1:])


def _section(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, dict) else {}


def _finite(value: float | None) -> float | None:
    """None for what JSON cannot say."""
    return value if value is not None and math.isfinite(value) else None


def _linear_mapping(linear: LinearAudit) -> dict[str, Any]:
    return {
        "module": linear.module,
        "role": linear.role,
        "shape": list(linear.shape),
        "bytes": linear.nbytes,
        "bits_per_weight": linear.bits_per_weight,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
            for t in linear.tensors
        ],
        "codes": dataclasses.asdict(linear.codes) if linear.codes else None,
        "input_scale": _finite(linear.input_scale),
    }
