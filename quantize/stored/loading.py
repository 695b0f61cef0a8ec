"""Loading a draft into torch for replay: BF16 or quantized, always as dequantized weights.

It shares no code with the side that writes folders.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from ...recipes.formats import KvCacheDtype, OnlineHead, ServedForm
from ...recipes.schema import LAYER_ROLES, QUANTIZABLE
from ..drafts import Draft, Family, Row
from ..drafts.draft_cache import CacheRounding, CacheScales
from ..drafts.forward import DraftForward, OnInput
from ..files.checkpoint import Checkpoint
from ..files.finiteness import Finiteness, check_finite
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import Bytes, floats, read_rows, read_whole
from .layouts.scheme import Activations
from .online_rounding import ONLINE_ACTIVATIONS, STATIC, InputRounding, kernel_scale, online_heads
from .stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from .stored_draft import StoredDraft
from .stored_tables import EMBEDDING, HEAD

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
                 "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}  # fmt: skip
BLOCK_BYTES = 32 << 20  # as stored; decoding takes some eight times as much


def held_dtype(stored: StoredDraft, row: Row, dtype: torch.dtype, *, compact: bool) -> torch.dtype:
    """The dtype that holds a row of `stored.draft`, for a computation in `dtype`.

    Codes whose inputs are rounded too are at least float32: kernels scale the sums of products.
    Compact: narrower matrices stay as they are stored, and are widened at each use.
    """
    if stored.is_quantized(row):
        scheme = stored.scheme_of(row)
        rounded = scheme is not None and scheme.activations != "none"
        return torch.promote_types(dtype, torch.float32) if rounded else dtype
    stored_dtype = _TORCH_DTYPES[row.tensor.dtype]
    if not stored_dtype.is_floating_point:
        return stored_dtype
    fits = len(row.tensor.shape) == 2 and torch.promote_types(stored_dtype, dtype) == dtype
    return stored_dtype if compact and fits else dtype


def read_weight(
    stored: StoredDraft,
    row: Row,
    dtype: torch.dtype,
    *,
    device: torch.device,
    twin: Tensor | None = None,
) -> Tensor:
    """A row of `stored.draft` as plain weights; `twin` itself where every bit equals it.

    Raises:
        CheckpointError: a tensor that engines never quantize is quantized, or a weight is NaN or
    """
    if stored.is_quantized(row) and row.role not in QUANTIZABLE:
        raise CheckpointError(
            stored.checkpoint.folder,
            f"{row.module} is quantized; engines take the {row.role} as floats only",
            fix=f"quantize {', '.join(QUANTIZABLE)} only",
        )
    shape = row.tensor.shape
    if twin is not None and (twin.dtype, twin.shape, twin.device.type) == (
        dtype, torch.Size(shape), device.type
    ):  # fmt: skip
        blocks = _blocks(stored, row)
        if all(_same_bits(block.to(twin.device, dtype), twin[at]) for at, block in blocks):
            return twin
    weight = torch.empty(shape, dtype=dtype, device=device)
    for at, block in _blocks(stored, row):
        weight[at] = block
    return weight


def blocks_of_bytes(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterator[tuple[slice, Bytes]]:
    """The rows of a tensor and their bytes, some at a time; a tensor without axes is one row."""
    rows = tensor.shape[0] if tensor.shape else 1
    for at in _slices(rows, tensor.nbytes):
        yield at, read_rows(checkpoint, tensor, at.start, at.stop)


def _blocks(stored: StoredDraft, row: Row) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight and their values, in the dtype of the file or decoded as float32."""
    tensor = row.tensor
    if stored.is_quantized(row):
        linear, finiteness = stored.linear(row), Finiteness("F32", tensor.shape)
        for at in _slices(linear.out_features, tensor.numel * 2):
            decoded = linear.decoded(range(at.start, at.stop)).dequantized()
            finiteness.look(decoded)
            yield at, torch.from_numpy(decoded)
    else:
        finiteness = Finiteness(tensor.dtype, tensor.shape)
        for at, block in blocks_of_bytes(stored.checkpoint, tensor):
            finiteness.look(block)
            values = torch.from_numpy(block)
            is_mask = tensor.dtype == "BOOL"
            values = values != 0 if is_mask else values.view(_TORCH_DTYPES[tensor.dtype])
            yield at, values.reshape(-1, *tensor.shape[1:]) if tensor.shape else values
    if finiteness.problem:
        check_finite(stored.checkpoint.folder, {tensor.name: finiteness.problem})


def _slices(rows: int, nbytes: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES * rows // max(nbytes, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """True if all bits are equal, even the sign of zero."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft that can be run.

    Attributes:
        weights: by canonical name, dequantized; d2t and t2d keep their dtype. All on one device.
        quantized: canonical module names of the linears served quantized; empty for BF16.
        linears: canonical module names of all attention and MLP linears, without fc and the head.
        cache_scales: scales of its FP8 KV cache, by layer; empty where there is none.
        forward: the maths over `weights`, rounding activations and cache as the folder declares.
        fusion_sha256: hash over fc and the norms around it, which fused features depend on.
    """

    name: str
    family: Family
    geometry: Any
    weights: Mapping[str, Tensor]
    quantized: tuple[str, ...]
    linears: tuple[str, ...]
    activations: Mapping[str, Activations]
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)
    forward: DraftForward
    fusion_sha256: str
    dtype: torch.dtype
    device: torch.device

    @property
    def rounds_alone(self) -> bool:
        """True if a token's inputs are rounded independently of other tokens in the same call."""
        return "tensor-dynamic" not in self.activations.values()

    def with_cache(self, scales: Mapping[int, CacheScales]) -> "LoadedDraft":
        """The same draft with its keys and values kept in FP8 under these scales."""
        forward = self.forward.caching(CacheRounding(scales))
        return dataclasses.replace(self, cache_scales=scales, forward=forward)


def load_draft(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    compact: bool = False,
    like: LoadedDraft | None = None,
    on_input: OnInput | None = None,
    shared: Mapping[str, Tensor] | None = None,
    rope_theta: float | None = None,
    online_head: OnlineHead | None = None,
    kv_cache: KvCacheDtype | None = None,
    subtree: str | None = None,
) -> LoadedDraft:
    """Load a BF16 folder, or a quantized one in any layout that can be read.

    Args:
        dtype: of the computation and, unless compact, of the weights. In bfloat16 products are
            those of engines: weights rounded to BF16 (codes times scale once; codes of linears
            whose inputs are rounded too stay exact), sums in float32, results in BF16.
        compact: hold matrices as narrow as they are stored: the same results in half the memory.
        like: a draft loaded in the same way; tensors that equal its own are shared.
        on_input: sees every input of a linear before it is rounded; its result is used instead.
        shared: the target's "embed_tokens.weight" [vocabulary, W] and "lm_head.weight"
            [draft vocabulary, W], for drafts stored without them.
        rope_theta: base of the rotary frequencies, instead of the config's, which engines use.
        kv_cache: an engine's option for the draft's KV cache, with scales of 1 where the folder
            stores none; None = as the folder declares.

    Raises:
        CheckpointError: the folder is not a draft or not as declared, a table is neither
            stored nor given, or it cannot be served as requested.
        VerifyError: its quantization_config is not understood.
    """
    checkpoint = Checkpoint.open(folder, subtree=subtree)
    stored = StoredDraft.read(checkpoint)
    draft = stored.draft
    if (why := draft.family.no_maths(draft.geometry)) is not None:
        fix = "serve it: draftquant measure on two servers, with the BF16 draft and with the"
        raise CheckpointError(folder, why, fix=f"{fix} quantized one, then gate --measured")
    geometry = draft.geometry if rope_theta is None else _rebased(draft.geometry, rope_theta)
    twins, given = like.weights if like else {}, shared or {}
    specs = draft.family.tensor_specs(draft.geometry)
    weights = {}
    for row in (row for row in draft.rows if not specs[row.canonical].tied):
        held, twin = held_dtype(stored, row, dtype, compact=compact), twins.get(row.canonical)
        weights[row.canonical] = read_weight(stored, row, held, device=device, twin=twin)
    for name, table in _from_target(draft, given).items():
        fits = torch.promote_types(table.dtype, dtype) == dtype
        weights[name] = table.to(device, table.dtype if compact and fits else dtype)
    beside = draft.family.side_weights(draft.geometry, folder)
    weights |= {name: weight.to(device, dtype) for name, weight in beside.items()}
    linears = tuple(row.canonical_module for row in draft.rows if row.role in LAYER_ROLES)
    quantized = {row.canonical_module: row for row in draft.rows if stored.is_quantized(row)}
    schemes = {name: stored.scheme_of(row) for name, row in quantized.items()}
    activations = {name: s.activations for name, s in schemes.items() if s is not None}
    static = {name: how for name, how in activations.items() if how in STATIC}
    scales = {n: input_scale(stored, quantized[n], how, device) for n, how in static.items()}
    served_heads = online_heads(stored, weights, given, online_head, dtype)
    weights |= served_heads
    online = [name.removesuffix(".weight") for name in served_heads]
    if online_head is not None:
        activations |= dict.fromkeys(online, ONLINE_ACTIVATIONS[online_head])
    rounding = InputRounding(activations, scales, on_input)
    loaded = LoadedDraft(
        name=ServedForm(online_head=online_head, kv_cache=kv_cache).label(folder.name),
        family=draft.family,
        geometry=geometry,
        weights=weights,
        quantized=tuple(sorted({*quantized, *online})),
        linears=linears,
        activations=activations,
        forward=draft.family.forward(geometry, weights, rounding),
        fusion_sha256=_fusion_sha256(stored),
        dtype=dtype,
        device=device,
    )
    cache = stored.served_cache(kv_cache)
    return loaded.with_cache(cache) if cache else loaded


def _rebased(geometry: Any, rope_theta: float) -> Any:
    if not 1 < rope_theta < float("inf"):
        raise CheckpointError(
            "rope_theta",
            f"expected a number above 1, got {rope_theta}",
            fix="give a rope base that the draft may have been trained with, for example 10000",
        )
    if geometry.rope is None:
        raise CheckpointError(
            "rope_theta",
            "this draft has no attention, so it has no rotary embedding",
            fix="leave --rope-theta out",
        )
    rope = dataclasses.replace(geometry.rope, theta=float(rope_theta))
    return dataclasses.replace(geometry, rope=rope)


def input_scale(stored: StoredDraft, row: Row, how: Activations, device: torch.device) -> Tensor:
    """The stored static scale of a linear's input, [], in the form that `InputRounding` takes."""
    parts = stored.parts(row)
    (suffix,) = parts.keys() & set(INPUT_SCALES)
    checkpoint, tensor = stored.checkpoint, parts[suffix]
    stored_scale = torch.from_numpy(floats(read_whole(checkpoint, tensor), tensor.dtype))[0]
    scale = stored_scale if suffix == INVERSE_INPUT_SCALE else kernel_scale(how, stored_scale)
    if not 0 < scale < float("inf"):
        what = f"{tensor.name}: expected a positive scale, got {float(stored_scale)}"
        raise CheckpointError(checkpoint.folder, what, fix="quantize again with calibration traces")
    return scale.to(device)


def _from_target(draft: Draft, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    specs = draft.family.tensor_specs(draft.geometry)
    tensors = {}
    for name, spec in specs.items():
        if name not in (EMBEDDING, HEAD) or spec.tied or draft.row(name) is not None:
            continue
        shape = tuple(dim.size for dim in spec.shape)
        if name not in shared:
            raise CheckpointError(
                draft.checkpoint.folder,
                f"the draft does not store {name}, which it shares with the target",
                fix="give the target (--target M), or traces recorded with --tables",
            )
        if shared[name].shape != shape:
            raise CheckpointError(
                draft.checkpoint.folder,
                f"{name}: expected shape {list(shape)}, the target's is {list(shared[name].shape)}",
                fix="give the target that this draft was trained for",
            )
        tensors[name] = shared[name]
    return tensors


def _fusion_sha256(stored: StoredDraft) -> str:
    """Over the names and bytes of what is stored, so that a quantized fc has another hash."""
    digest = hashlib.sha256()
    for row in sorted(stored.draft.rows, key=lambda row: row.canonical):
        if not row.canonical.startswith(stored.draft.family.makes_features):
            continue
        parts = stored.parts(row) if stored.is_quantized(row) else {row.canonical: row.tensor}
        for name, tensor in sorted(parts.items()):
            digest.update(name.encode())
            for _, block in blocks_of_bytes(stored.checkpoint, tensor):
                digest.update(block.data)
    return digest.hexdigest()
