"""A draft as it would be with fewer rows in its head: headers and geometry alone."""

from dataclasses import replace
from math import prod

from ...quantize.drafts import Draft, read_config
from ...quantize.drafts.family import Row, TensorSpec
from ...quantize.errors import CheckpointError, EstimateError
from ...quantize.files.safetensors_header import DTYPE_BYTES, TensorInfo


def with_vocabulary(draft: Draft, size: int) -> Draft:
    """The draft as it would be with a head of `size` kept rows: headers and geometry alone.

    Every tensor whose spec has the dimension draft_vocab_size has so many rows; a head that was the
    target's is the draft's own, in the dtype of the draft; the maps d2t and t2d are there.

    Raises:
        EstimateError: the family takes no cut head, or the draft has no more rows than that.
    """
    held = draft.geometry.draft_vocab_size
    if not 0 < size < held:
        raise EstimateError(
            "--sizes",
            f"expected at least 1 and fewer than the {held:,} rows of the head, got {size:,}",
            fix="give the number of rows to keep, such as 32000",
        )
    config = {**draft.checkpoint.config, "draft_vocab_size": size}
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        raise EstimateError("--sizes", exc.what, fix="give a draft whose head can be cut") from exc
    specs = draft.family.tensor_specs(geometry)
    if geometry.draft_vocab_size != size or "d2t" not in specs:
        raise EstimateError(
            "--sizes",
            f"drafts of {draft.family.name} have no map of a cut vocabulary",
            fix="give a draft whose head can be cut",
        )
    rows = {row.canonical: row for row in draft.rows}
    dtypes = {"lm_head.weight": _dtype(draft), "d2t": "I64", "t2d": "BOOL"}
    held_rows = [_resized(row, specs[row.canonical]) for row in draft.rows]
    made = [_made(name, dtype, specs[name]) for name, dtype in dtypes.items() if name not in rows]
    ordered = sorted([*held_rows, *made], key=lambda row: row.tensor.name)
    tensors = {row.tensor.name: row.tensor for row in ordered}
    return replace(
        draft,
        checkpoint=replace(draft.checkpoint, config=config, tensors=tensors),
        geometry=geometry,
        rows=tuple(ordered),
    )


def _resized(row: Row, spec: TensorSpec) -> Row:
    shape = tuple(dim.size for dim in spec.shape)
    stop = row.tensor.start + prod(shape) * DTYPE_BYTES[row.tensor.dtype]
    file = "" if row.role == "vocabulary_map" else row.tensor.file  # other numbers than it holds
    return replace(row, tensor=replace(row.tensor, file=file, shape=shape, stop=stop))


def _made(name: str, dtype: str, spec: TensorSpec) -> Row:
    """A tensor that no file has yet."""
    shape = tuple(dim.size for dim in spec.shape)
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    tensor = TensorInfo(name=name, dtype=dtype, shape=shape, file="", start=0, stop=nbytes)
    return Row(tensor=tensor, canonical=name, role=spec.role)


def _dtype(draft: Draft) -> str:
    """Of its norms, or of its first tensor."""
    norms = [row for row in draft.rows if row.role == "norm"]
    return (*norms, *draft.rows)[0].tensor.dtype
