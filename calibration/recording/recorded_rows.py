"""What is recorded of a batch: it stays on the device, and leaves when its rows have ended.

Features of long texts do not stay: they go to a file of each row as the target gives them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.files.torch_file import SpooledRows
from ..traces.manifest import LogprobSpec
from .decoding import ChosenTokens

LONG_TEXT = 4096
"""Tokens of prompt and answer beyond which features are written as they come."""

Fuse = Callable[[Tensor], Tensor]
"""What a draft's fc makes of the features [n, width] of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRow:
    """What was recorded of one row, on the CPU.

    Attributes:
        features: [n - 1, width], of a long text a file's: see `mapped_rows`. top1: [n - 1] int64.
        chosen: tokens [m] of the continuation, and their log-probabilities.
    """

    features: Tensor
    top1: Tensor
    chosen: ChosenTokens


class KeptRows:
    """Buffers [R, longest, ...]: entry i of a row is what the target gave for its token i.

    Args:
        fuse: made of the features of a prompt before they leave; None = nothing.
        spool: folder on whose disk the features lie until they leave, where `longest` is more than
            `LONG_TEXT`; None = they stay on the device.
    """

    def __init__(
        self,
        num_rows: int,
        longest: int,
        *,
        width: int,
        dtype: torch.dtype,
        stored: torch.dtype,
        spec: LogprobSpec | None,
        device: torch.device,
        fuse: Fuse | None = None,
        spool: Path | None = None,
    ) -> None:
        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_rows, longest, *shape), dtype=dtype, device=device)

        num_top = spec.num_top if spec else 0
        self._spool = spool if longest > LONG_TEXT else None
        self._spooled: dict[int, SpooledRows] = {}
        self._features = buffer(0 if self._spool else width, dtype=dtype)
        self._stored, self._fuse = stored, fuse
        self._top1 = buffer(dtype=torch.int64)
        self._token = buffer(dtype=torch.int64)
        self._logprob = buffer(dtype=torch.float32) if spec else None
        self._top_ids = buffer(num_top, dtype=torch.int64) if num_top else None
        self._top_logprobs = buffer(num_top, dtype=torch.float32) if num_top else None

    def read(self, row: int, start: int, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for tokens of a prompt: [t, width] and [t], from `start`."""
        entries = slice(start, start + len(top1))
        self._top1[row, entries] = top1
        if not self._spool:
            self._features[row, entries] = features.to(self._features.device)
            return
        if start == 0:
            self._spooled.pop(row, None)
        self._write(row, start, features)

    def run(self, rows: Tensor, at: Tensor, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for one token each: [B, width] and [B], of these entries."""
        self._top1[rows, at] = top1
        if not self._spool:
            self._features[rows, at] = features.to(self._features.device)
            return
        for i, (row, entry) in enumerate(zip(rows.tolist(), at.tolist(), strict=True)):
            self._write(row, entry, features[i : i + 1])

    def chose(self, rows: Tensor, at: Tensor, chosen: ChosenTokens) -> None:
        """Keep the tokens that were chosen behind these entries."""
        self._token[rows, at] = chosen.token_ids
        for buffer, found in (
            (self._logprob, chosen.logprob),
            (self._top_ids, chosen.top_token_ids),
            (self._top_logprobs, chosen.top_logprobs),
        ):
            if buffer is not None and found is not None:
                buffer[rows, at] = found

    def continuations(self, rows: Sequence[int]) -> Tensor:
        """[B, longest]: the tokens that were chosen, on the CPU; valid behind a prompt alone."""
        return self._token[torch.tensor(rows)].cpu()

    def leave(
        self,
        rows: Sequence[int],
        entries: Sequence[slice],
    ) -> list[LeftRow]:
        """Copy rows to the CPU, each kind of what was recorded in one go.

        On a GPU they are complete only when its stream has come so far.
        """
        ends = [(row, slice(0, some.stop)) for row, some in zip(rows, entries, strict=True)]
        behind = list(zip(rows, entries, strict=True))
        if self._spool:
            features = [self._spooled.pop(row).rows(some.stop) for row, some in ends]
        else:
            features = self._split(self._features, ends, self._fuse)
        top1 = self._split(self._top1, ends)
        tokens = self._split(self._token, behind)
        logprob, top_ids, top_logprobs = (
            [None] * len(rows) if buffer is None else self._split(buffer, behind)
            for buffer in (self._logprob, self._top_ids, self._top_logprobs)
        )
        return [
            LeftRow(
                features=features[i],
                top1=top1[i],
                chosen=ChosenTokens(
                    token_ids=tokens[i],
                    logprob=logprob[i],
                    top_token_ids=top_ids[i],
                    top_logprobs=top_logprobs[i],
                ),
            )
            for i in range(len(rows))
        ]

    def _write(self, row: int, start: int, features: Tensor) -> None:
        """Features [n, width] of a row, from entry `start` on."""
        assert self._spool is not None  # or they stay
        own = self._fuse(features) if self._fuse else features
        if row not in self._spooled:
            self._spooled[row] = SpooledRows(self._spool, own.shape[1], self._stored)
        self._spooled[row].write(start, own)

    def _split(
        self,
        buffer: Tensor,
        places: Sequence[tuple[int, slice]],
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """What is at these places, copied to the CPU together."""
        parts = [buffer[row, entries] for row, entries in places]
        packed = torch.cat([change(part) for part in parts] if change else parts)
        if buffer is self._features:
            packed = packed.to(self._stored)
        return list(torch.split(_to_cpu(packed), [len(part) for part in parts]))


def entry_bytes(width: int, dtype: torch.dtype, spec: LogprobSpec | None) -> int:
    """Bytes of one entry."""
    return width * dtype.itemsize + 16 + (4 + 12 * spec.num_top if spec else 0)


def _to_cpu(found: Tensor) -> Tensor:
    """A copy that the device makes while it goes on; `torch.cat` has made one on a CPU."""
    if found.device.type != "cuda":
        return found.cpu()
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return host.copy_(found, non_blocking=True)
