"""Experts that are stacked in one tensor, as tensors of their own: slices of its bytes.

Qwen3.5's MoE layers and what speculators and transformers 5 save hold `experts.gate_up_proj`
[E, 2 I, W], gate above up, and `experts.down_proj` [E, W, I]. Every expert's matrices are rows that
lie in one piece there, so they are named and placed as the released folders of Qwen3-Next have
them, `experts.0.gate_proj.weight`: from there on they are tensors like others. What is written has
these names, which vLLM 0.33 and SGLang 0.5.23 load (`tests/engines/mtp.json`).

The layout of gpt-oss, [E, W, 2 I] with gate and up in turn, has no such rows; no MTP layer has it.
"""

import dataclasses
import re
from collections.abc import Iterator

from .safetensors_header import Header, TensorInfo

_STACKED = re.compile(r"((?:mtp\.layers|mtp_layers)\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
MOST_EXPERTS = 4096
"""A header that claims more is no model's: it would become as many tensors."""
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def unstacked(header: Header) -> Header:
    """The header with a tensor for each matrix of each expert; unchanged where none is stacked."""
    if not any(_is_stacked(tensor) for tensor in header.tensors):
        return header
    tensors = tuple(part for tensor in header.tensors for part in _matrices(tensor))
    return dataclasses.replace(header, tensors=tensors)


def _is_stacked(tensor: TensorInfo) -> bool:
    found = _STACKED.fullmatch(tensor.name)
    if found is None or len(tensor.shape) != 3:
        return False
    good = 0 < tensor.shape[0] <= MOST_EXPERTS and tensor.numel > 0
    return good and tensor.shape[1] % len(_PARTS[found[2]]) == 0


def _matrices(tensor: TensorInfo) -> Iterator[TensorInfo]:
    """The matrices that a tensor is made of, itself where it is none of experts."""
    found = _STACKED.fullmatch(tensor.name)
    if found is None or not _is_stacked(tensor):
        yield tensor
        return
    experts, rows, columns = tensor.shape
    parts = _PARTS[found[2]]
    nbytes = tensor.nbytes // (experts * len(parts))
    for i in range(experts * len(parts)):
        expert, part = divmod(i, len(parts))
        start = tensor.start + i * nbytes
        yield TensorInfo(
            name=f"{found[1]}.{expert}.{parts[part]}.weight",
            dtype=tensor.dtype,
            shape=(rows // len(parts), columns),
            file=tensor.file,
            start=start,
            stop=start + nbytes,
        )
