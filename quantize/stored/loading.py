"""Loading a draft into torch for replay: BF16 or quantized, always as dequantized weights.

What an engine would compute with a folder is reproduced here from what the folder declares and
stores; it shares no code with the side that wrote it.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafts import Draft, Family, Row
from ..drafts.forward import DraftForward, OnInput
from ..errors import CheckpointError
from ..files.checkpoint import Checkpoint
from .activations import InputRounding
from .decode import floats, read_whole
from .draft import StoredDraft
from .parts import FLOAT_DTYPES

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
                 "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft that can be run.

    Attributes:
        name: of the folder.
        weights: by canonical name, dequantized; d2t and t2d keep their dtype.
        quantized: canonical module names of the linears stored quantized; empty for BF16.
        linears: canonical module names of every attention and MLP linear.
        forward: the maths over `weights`, rounding activations as the folder declares.
        fusion_sha256: over fc and the norms around it, which fused features depend on.
    """

    name: str
    family: Family
    geometry: Any
    weights: Mapping[str, Tensor]
    quantized: tuple[str, ...]
    linears: tuple[str, ...]
    forward: DraftForward
    fusion_sha256: str


def load_draft(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    on_input: OnInput | None = None,
    shared: Mapping[str, Tensor] | None = None,
    rope_theta: float | None = None,
) -> LoadedDraft:
    """Load a BF16 folder, or a quantized one of any layout that `declared` understands.

    Args:
        folder: the draft.
        dtype: of the weights and of the computation.
        on_input: sees the input of every attention and MLP linear before it is rounded; what it
            returns goes on.
        shared: the target's "embed_tokens.weight" [vocabulary, W] and "lm_head.weight"
            [draft vocabulary, W], for drafts stored without them.
        rope_theta: base of the rotary frequencies instead of the config's, which engines use: some
            trainers used another one, and acceptance shows which.

    Raises:
        CheckpointError: the folder is not a draft, a stored tensor is not as declared, or an
            embedding or head is neither stored nor given, or `rope_theta` is no base.
        VerifyError: its quantization_config is not understood.
    """
    checkpoint = Checkpoint.open(folder)
    stored = StoredDraft.read(checkpoint)
    draft, scheme = stored.draft, stored.scheme
    geometry = draft.geometry if rope_theta is None else _rebased(draft.geometry, rope_theta)
    weights = {row.canonical: _weight(stored, row, dtype) for row in draft.rows}
    weights |= _from_target(draft, shared or {}, dtype)
    beside = draft.family.side_weights(draft.geometry, folder)
    weights |= {name: weight.to(dtype) for name, weight in beside.items()}
    linears = tuple(_module(r.canonical) for r in draft.rows if r.role in ("attention", "mlp"))
    quantized = {_module(row.canonical): row for row in draft.rows if stored.is_quantized(row)}
    rounding = InputRounding(
        scheme.activations if scheme else "none",
        {name: _input_scale(checkpoint, row) for name, row in quantized.items()},
        on_input,
    )
    return LoadedDraft(
        name=folder.name,
        family=draft.family,
        geometry=geometry,
        weights=weights,
        quantized=tuple(sorted(quantized)),
        linears=linears,
        forward=draft.family.forward(geometry, weights, rounding),
        fusion_sha256=_fusion_sha256(checkpoint, draft),
    )


def _rebased(geometry: Any, rope_theta: float) -> Any:
    """The geometry with another base of its rotary frequencies."""
    if not 1 < rope_theta < float("inf"):
        raise CheckpointError(
            "rope_theta",
            f"expected a number above 1, got {rope_theta}",
            fix="give the base that the draft may have been trained with, for example 10000",
        )
    rope = dataclasses.replace(geometry.rope, theta=float(rope_theta))
    return dataclasses.replace(geometry, rope=rope)


def _weight(stored: StoredDraft, row: Row, dtype: torch.dtype) -> Tensor:
    if stored.is_quantized(row):
        if row.role not in ("attention", "mlp"):
            raise CheckpointError(
                stored.checkpoint.folder,
                f"{_module(row.tensor.name)} is quantized; engines keep the {row.role} in floating"
                " point",
                fix="quantize attention and MLP linears only",
            )
        return torch.from_numpy(stored.linear(row).decoded().dequantized()).to(dtype)
    tensor, block = row.tensor, read_whole(stored.checkpoint, row.tensor)
    if tensor.dtype in FLOAT_DTYPES:
        return torch.from_numpy(floats(block, tensor.dtype)).reshape(tensor.shape).to(dtype)
    if tensor.dtype == "BOOL":
        return torch.from_numpy(block != 0).reshape(tensor.shape)
    return torch.from_numpy(block).view(_TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)


def _input_scale(checkpoint: Checkpoint, row: Row) -> Tensor | None:
    """The static scale of a linear's input, [] float32; None where it is not stored."""
    tensor = checkpoint.tensors.get(f"{_module(row.tensor.name)}.input_scale")
    if tensor is None:
        return None
    scale = float(floats(read_whole(checkpoint, tensor), tensor.dtype)[0])
    if not 0 < scale < float("inf"):
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: expected a positive scale, got {scale}",
            fix="quantize again with calibration traces",
        )
    return torch.tensor(scale)


def _from_target(
    draft: Draft, shared: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The embedding and the head that the draft does not store itself."""
    specs = draft.family.tensor_specs(draft.geometry)
    found = {}
    for name, spec in specs.items():
        if spec.role not in ("embedding", "head") or draft.row(name) is not None:
            continue
        shape = tuple(dim.size for dim in spec.shape)
        if name not in shared:
            raise CheckpointError(
                draft.checkpoint.folder,
                f"{name} is not stored: the draft shares the target's",
                fix="give the target (--target M), or traces recorded with --tables",
            )
        if tuple(shared[name].shape) != shape:
            raise CheckpointError(
                draft.checkpoint.folder,
                f"{name}: expected shape {list(shape)}, the target's is {list(shared[name].shape)}",
                fix="give the target that this draft was trained for",
            )
        found[name] = shared[name].to(dtype)
    return found


def _fusion_sha256(checkpoint: Checkpoint, draft: Draft) -> str:
    digest = hashlib.sha256()
    for row in sorted(draft.rows, key=lambda row: row.canonical):
        if row.canonical.startswith(draft.family.makes_features):
            digest.update(row.canonical.encode())
            digest.update(read_whole(checkpoint, row.tensor).data)
    return digest.hexdigest()


def _module(name: str) -> str:
    return name.removesuffix(".weight")
