"""One text of a dump as plain tensors, whichever trainer wrote it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..errors import TraceError

AGAIN = "dump again, or give the dump of another trainer its own name: --from"
TEXT_AGAIN = "dump this text again, with prefix caching and chunked prefill off"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One text and what its target computed, one row for each token.

    Attributes:
        id: of the text within the dump, from its file's name.
        file: for errors.
        token_ids: [N] int64.
        answered: [N] bool, the tokens that the dump calls the target's answers; None where it does
            not say.
        aux: [N, m * W], outputs of m layers side by side, floating point.
        last: [N, W], what the head reads or what the norm before it reads; None where absent.
        scales: [N] float32, of aux features that the dump rounded to FP8; None = not rounded.
    """

    id: str
    file: Path
    token_ids: Tensor
    answered: Tensor | None
    aux: Tensor
    last: Tensor | None
    scales: Tensor | None = None


class Pending(NamedTuple):
    """A sample that is still on the disk: its file, and what reads it."""

    file: Path
    read: Callable[[], Sample]


def make_sample(
    file: Path,
    name: str,
    *,
    token_ids: Tensor,
    answered: Tensor | None,
    aux: Tensor,
    last: Tensor | None,
    scales: Tensor | None = None,
) -> Sample:
    """A sample of tensors as they were stored: leading axes of 1 fall away.

    Args:
        token_ids: [N] or [1, N], whole numbers.
        answered: [N] or [1, N], 0 or 1 of any dtype.
        aux: [N, m * W] or [1, N, m * W], also [N, m, W].
        last: [N, W] or [1, N, W].
        scales: [N].

    Raises:
        TraceError: a shape, a dtype or a length says that the file is none of its kind, or cut off.
    """
    ids = _rows(file, "token ids", token_ids, axes=1)
    if ids.is_floating_point() or ids.is_complex() or not len(ids):
        raise TraceError(file, f"token ids: expected at least one whole number, got {_said(ids)}",
                         fix=AGAIN)  # fmt: skip
    sample = Sample(
        id=name,
        file=file,
        token_ids=ids.long(),
        answered=None if answered is None else _rows(file, "loss_mask", answered, axes=1) != 0,
        aux=_features(file, "aux hidden states", aux),
        last=None if last is None else _features(file, "last hidden states", last),
        scales=scales,
    )
    for what, rows in (
        ("the loss mask", sample.answered),
        ("the aux hidden states", sample.aux),
        ("the last hidden states", sample.last),
        ("the scales of the hidden states", sample.scales),
    ):
        if rows is not None and len(rows) != len(ids):
            raise TraceError(
                file,
                f"the text has {len(ids)} tokens, but {what} have {len(rows)} rows: the file"
                " is cut off, or they belong to another text",
                fix=TEXT_AGAIN,
            )
    return sample


def _features(file: Path, what: str, stored: Tensor) -> Tensor:
    rows = _rows(file, what, stored, axes=2)
    if not rows.is_floating_point() or rows.element_size() == 1 or not rows.shape[1]:
        raise TraceError(file, f"{what}: expected BF16, F16, F32 or F64 rows, got {_said(stored)}",
                         fix=AGAIN)  # fmt: skip
    return rows


def _rows(file: Path, what: str, stored: Tensor, *, axes: int) -> Tensor:
    """Without a batch axis of 1; the layers of a stack side by side."""
    rows = stored
    if rows.dim() == axes + 1 and rows.shape[0] == 1:
        rows = rows[0]
    if axes == 2 and rows.dim() == 3:
        rows = rows.flatten(1)
    if rows.dim() != axes:
        expected = f"expected a tensor of {axes} axes, or a batch of one"
        raise TraceError(file, f"{what}: {expected}, got {_said(stored)}",
                         fix="dump texts one by one, not in batches")  # fmt: skip
    return rows


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
