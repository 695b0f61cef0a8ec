"""MXFP4 stored as NVFP4: the same codes, and the same scales, for half as many codes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...recipes.errors import LayoutError
from ...recipes.schema import Recipe, WeightFormat
from ..drafts import Row
from ..stored.stored_draft import StoredDraft


def as_nvfp4(read: Recipe) -> WeightFormat:
    """The same codes, under scales for half as many of them."""
    if read.weights.dtype != "mxfp4" or read.activations is not None:
        inputs = f"inputs in {read.activations}" if read.activations else "inputs in BF16"
        raise LayoutError(
            "carrier nvfp4",
            f"expected weights in mxfp4 and inputs in BF16, got {read.weights}, {inputs}",
            fix="leave it out, or quantize the BF16 draft with recipe nvfp4-weights",
        )
    return WeightFormat(dtype="nvfp4", granularity="group", group_size=16, symmetric=True)


_POWERS = (-9, 8)
"""Of two: the smallest and the largest in E4M3."""


def global_scales(source: StoredDraft, codes: Sequence[Row]) -> dict[str, float]:
    """The scale over those of groups: one for all linears of a block, which engines fuse.

    LayoutError for the first group whose scale E4M3 cannot hold below it; scales of zeros fit.
    """
    blocks: dict[str, list[Row]] = {}
    for row in codes:
        blocks.setdefault(row.module.rpartition(".")[0], []).append(row)
    scales = {}
    for block in blocks.values():
        used = {row.module: _used_scales(source, row) for row in block}
        largest = max((float(each.max()) for each in used.values()), default=0.0) or 1.0
        over = largest * 2.0 ** -_POWERS[1]
        for module, each in used.items():
            least = float(each[each > 0].min()) if bool((each > 0).any()) else largest
            if not least / over >= 2.0 ** _POWERS[0]:
                row_number, group = (each == least).nonzero()[0].tolist()
                raise LayoutError(
                    f"{module}: row {row_number}, group {group}",
                    f"its scale {least:g} is more than {_POWERS[1] - _POWERS[0]} powers of two"
                    f" below the largest of its block, {largest:g}, and NVFP4 holds no more",
                    fix="keep MXFP4, or quantize the BF16 draft with recipe nvfp4-weights",
                )
            scales[module] = over
    return scales


def _used_scales(source: StoredDraft, row: Row) -> Tensor:
    """[rows, groups]: the scales of MXFP4, 0 where all codes of a group are zeros."""
    decoded = source.linear(row).decoded()
    used = decoded.codes.reshape(*decoded.scale.shape, -1).any(axis=-1)
    return torch.from_numpy(decoded.scale * used)


def scales_below(source: StoredDraft, row: Row, over: Tensor) -> Tensor:
    """[rows, 2 x groups] in E4M3, below the global scale; those of zeros are 1."""
    used = _used_scales(source, row)
    below = torch.where(used > 0, used / over, 1.0)
    return below.to(torch.float8_e4m3fn).repeat_interleave(2, dim=1)
