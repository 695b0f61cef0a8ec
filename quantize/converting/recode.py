"""Stored codes and scales as the blocks that layouts encode: read, never computed."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError, LayoutError
from ...recipes.schema import Recipe, WeightFormat
from ..drafts import Row
from ..layouts.layout import rows_of_block
from ..numerics.quantized_weight import QuantizedWeight, carried
from ..stored.decoded_numbers import blocks_of, stored_scalar
from ..stored.linear import StoredLinear, global_scale, input_groups, stored_scales, zero_points
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft

_BLOCK = 2**18  # codes: a few float32 arrays of them fit the cache of a core
_SCALE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def check_one_format(source: StoredDraft) -> None:
    """Fail for a folder of several formats."""
    scheme = source.scheme
    groups = (scheme, *scheme.others) if scheme is not None else ()
    if len({replace(each, targets=(), others=(), excludes=()) for each in groups}) > 1:
        raise LayoutError(
            source.checkpoint.folder,
            "expected one format for all linears, got several, which no other layout holds:"
            f" {source.scheme}",
            fix="quantize the BF16 draft with a recipe of the wanted layout",
        )


def check_counts_from_the_middle(source: StoredDraft) -> None:
    """LayoutError for the first linear whose codes no layout of this package holds."""
    for row in source.draft.rows:
        scheme = source.scheme_of(row)
        if scheme is None:
            continue
        (rows, columns), of = row.tensor.shape, (source.checkpoint, scheme, row.module)
        asymmetric = zero_points(*of, rows) is not None
        if asymmetric or input_groups(*of, columns) is not None:
            what = "asymmetric codes" if asymmetric else "inputs in the order of their activations"
            raise LayoutError(
                f"{row.module}: {what}",
                "no layout that draftquant writes holds them",
                fix="`draftquant dequantize` the folder, and quantize the weights with a recipe",
            )


def recoded_blocks(source: StoredDraft, row: Row, recipe: Recipe) -> Iterator[QuantizedWeight]:
    """The codes and scales of a linear, block by block, as they would come from quantizing.

    The dtype of the row is that of its INT4 scales; LayoutError where a scale is not exact in it.
    """
    weights, linear = recipe.weights, source.linear(row)
    scale, over = _scales(source, row, recipe, linear), None
    if weights.number.global_scale or weights.first_stage:
        over = torch.tensor(global_scale(source.checkpoint, row.module))
    out_features, in_features = row.tensor.shape
    multiple = rows_of_block(weights)
    step = max(1, _BLOCK // in_features // multiple) * multiple
    for rows in blocks_of(out_features, step):
        block = QuantizedWeight(
            codes=_codes(linear, rows, weights),
            scale=_of_rows(scale, rows, weights),
            global_scale=over,
            group_size=weights.group_size,
        )
        yield carried(block) if weights.carrier else block


def stored_input_scale(source: StoredDraft, row: Row, recipe: Recipe) -> float | None:
    """The static scale of a linear's input; None where the recipe has none."""
    if not recipe.needs_input_scales:
        return None
    for suffix in INPUT_SCALES:
        tensor = source.checkpoint.tensors.get(f"{row.module}.{suffix}")
        if tensor is not None:
            value = stored_scalar(source.checkpoint, tensor)
            return 1 / value if suffix == INVERSE_INPUT_SCALE else value
    raise CheckpointError(
        source.checkpoint.folder,
        f"{row.module} has no stored input scale",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _codes(linear: StoredLinear, rows: range, weights: WeightFormat) -> Tensor:
    """Codes [rows, in_features] as `QuantizedWeight` has them; carried ones are INT4 again."""
    stored = linear.bytes_of(rows)
    if weights.number.is_integer:
        return torch.from_numpy(linear.codes(rows, stored)).to(torch.int8)
    raw = torch.from_numpy(stored.reshape(len(rows), -1))
    if weights.number.is_fp8:
        return raw.view(torch.float8_e4m3fn)
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def _of_rows(scale: Tensor, rows: range, weights: WeightFormat) -> Tensor:
    if weights.granularity == "tensor":
        return scale
    size = weights.group_size or 1 if weights.granularity == "block" else 1
    return scale[rows.start // size : -(-rows.stop // size)]


def _scales(source: StoredDraft, row: Row, recipe: Recipe, linear: StoredLinear) -> Tensor:
    """All scales of a linear in the dtype that the layout stores, [rows or blocks, groups]."""
    weights = recipe.weights
    if weights.granularity == "tensor":
        return torch.from_numpy(linear.scale)
    scheme = source.scheme_of(row)
    if scheme is None:
        raise ValueError(f"{row.tensor.name} is not stored quantized")
    exact = torch.from_numpy(stored_scales(source.checkpoint, scheme, row.module))
    if weights.number.global_scale:
        return exact.to(torch.float8_e4m3fn)
    if not weights.number.is_integer or weights.carrier or weights.first_stage:
        return exact
    dtype = _SCALE_DTYPES["F16" if weights.scale_dtype else row.tensor.dtype]
    scale = exact.to(dtype)
    wrong = (scale.float() != exact).nonzero()
    if len(wrong):
        first = float(exact[tuple(wrong[0])])
        raise LayoutError(
            f"{row.module}: scales",
            f"{len(wrong)} of {exact.numel()} are not exact in {dtype}, first {first:.9g}: layout"
            f" {recipe.layout} cannot hold them",
            fix="choose a layout that keeps their dtype, or quantize the BF16 draft for this one",
        )
    return scale
