"""Loading a draft into torch for replay: BF16 or quantized, always as dequantized weights.

What an engine would compute with a folder is reproduced here from what the folder declares and
stores; it shares no code with the side that wrote it.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...recipes.formats import KvCacheDtype, OnlineHead
from ...recipes.roles import LAYER_ROLES
from ...recipes.served_form import ServedForm
from ..drafts import Draft, Family, Row
from ..drafts.cache_rounding import CacheRounding
from ..drafts.forward import DraftForward, OnInput
from ..drafts.kv_cache import CacheScales
from ..errors import CheckpointError
from ..files.checkpoint import Checkpoint
from .activations import STATIC, InputRounding, kernel_scale
from .decoded_numbers import floats, read_whole
from .layouts.scheme import Activations
from .online_head import ONLINE_ACTIVATIONS, online_heads
from .parts import INPUT_SCALES, INVERSE_INPUT_SCALE
from .stored_draft import StoredDraft
from .table_names import EMBEDDING, HEAD
from .weights import blocks_of_bytes, held_dtype, read_weight

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft that can be run.

    Attributes:
        name: of the folder, and what is made of its head when it is served.
        weights: by canonical name, dequantized; d2t and t2d keep their dtype. All on one device.
        dtype: what is computed in; matrices may be held in another. device: where.
        quantized: canonical module names of the linears served quantized; empty for BF16.
        linears: canonical module names of every attention and MLP linear: fc and the head are none.
        activations: how the input of each quantized linear is rounded.
        cache_scales: of its FP8 KV cache, by layer; empty where keys and values are kept as they
            are computed.
        forward: the maths over `weights`, rounding activations and cache as the folder declares.
        fusion_sha256: over fc and the norms around it, which fused features depend on.
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
        """A token's inputs are rounded whatever other tokens go through the draft with it."""
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
    """Load a BF16 folder, or a quantized one of any layout that `declared` understands.

    Args:
        dtype: of the computation and, unless compact, of the weights. In bfloat16 products are
            those of engines: weights rounded to BF16 (codes times scale once; codes of linears
            whose inputs are rounded too stay exact), sums in float32, results in BF16.
        compact: hold matrices as narrow as they are stored: the same results in half the memory,
            for the time that widening them at each use takes.
        like: a draft loaded alike; tensors that equal its own bit for bit are its own.
        on_input: sees the input of every linear that may be quantized before it is rounded; what
            it returns goes on.
        shared: the target's "embed_tokens.weight" [vocabulary, W] and "lm_head.weight"
            [draft vocabulary, W], for drafts stored without them.
        rope_theta: base of the rotary frequencies instead of the config's, which engines use: some
            trainers used another one, and acceptance shows which.
        online_head: what vLLM makes of the head while it loads the draft, see `online_heads`.
        kv_cache: of an engine's option for the draft's KV cache: FP8, under scales of 1 where the
            folder stores none; None = as the folder declares.
        subtree: the draft is this layer of a target's folder, see `Checkpoint`.

    Raises:
        CheckpointError: the folder is not a draft, a stored tensor is not as declared, or an
            embedding or head is neither stored nor given, or `rope_theta` is no base, or vLLM makes
            no `online_head` of this draft's, or a `kv_cache` is asked of a draft without one.
        VerifyError: its quantization_config is not understood.
    """
    checkpoint = Checkpoint.open(folder, subtree=subtree)
    stored = StoredDraft.read(checkpoint)
    draft = stored.draft
    geometry = draft.geometry if rope_theta is None else _rebased(draft.geometry, rope_theta)
    twins = like.weights if like else {}
    specs = draft.family.tensor_specs(draft.geometry)
    weights = {
        row.canonical: read_weight(
            stored,
            row,
            held_dtype(stored, row, dtype, compact=compact),
            device=device,
            twin=twins.get(row.canonical),
        )
        for row in draft.rows
        if not specs[row.canonical].tied
    }
    for name, table in _from_target(draft, shared or {}).items():
        fits = torch.promote_types(table.dtype, dtype) == dtype
        weights[name] = table.to(device, table.dtype if compact and fits else dtype)
    beside = draft.family.side_weights(draft.geometry, folder)
    weights |= {name: weight.to(device, dtype) for name, weight in beside.items()}
    linears = tuple(_module(r.canonical) for r in draft.rows if r.role in LAYER_ROLES)
    quantized = {_module(row.canonical): row for row in draft.rows if stored.is_quantized(row)}
    activations = {
        name: scheme.activations
        for name, row in quantized.items()
        if (scheme := stored.scheme_of(row)) is not None
    }
    scales = {
        name: _input_scale(stored, row, activations[name], device)
        for name, row in quantized.items()
        if activations.get(name) in STATIC
    }
    online = online_heads(stored, weights, shared or {}, online_head, dtype)
    weights |= online
    if online_head is not None:
        activations |= dict.fromkeys(map(_module, online), ONLINE_ACTIVATIONS[online_head])
    rounding = InputRounding(activations, scales, on_input)
    loaded = LoadedDraft(
        name=ServedForm(online_head=online_head, kv_cache=kv_cache).label(folder.name),
        family=draft.family,
        geometry=geometry,
        weights=weights,
        quantized=tuple(sorted({*quantized, *map(_module, online)})),
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
    """The geometry with another base of its rotary frequencies."""
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


def _input_scale(stored: StoredDraft, row: Row, how: Activations, device: torch.device) -> Tensor:
    """The static scale of a linear's input, as kernels have it."""
    parts = stored.parts(row)
    (suffix,) = parts.keys() & set(INPUT_SCALES)
    checkpoint, tensor = stored.checkpoint, parts[suffix]
    found = torch.from_numpy(floats(read_whole(checkpoint, tensor), tensor.dtype))[0]
    scale = found if suffix == INVERSE_INPUT_SCALE else kernel_scale(how, found)
    if not 0 < scale < float("inf"):
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: expected a positive scale, got {float(found)}",
            fix="quantize again with calibration traces",
        )
    return scale.to(device)


def _from_target(draft: Draft, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The embedding and the head that the draft does not store itself."""
    specs = draft.family.tensor_specs(draft.geometry)
    found = {}
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
        if tuple(shared[name].shape) != shape:
            raise CheckpointError(
                draft.checkpoint.folder,
                f"{name}: expected shape {list(shape)}, the target's is {list(shared[name].shape)}",
                fix="give the target that this draft was trained for",
            )
        found[name] = shared[name]
    return found


def _fusion_sha256(stored: StoredDraft) -> str:
    """Over the names and bytes of what is stored, so that a quantized fc is another one."""
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


def _module(name: str) -> str:
    return name.removesuffix(".weight")
