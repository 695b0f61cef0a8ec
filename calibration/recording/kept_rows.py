"""What is recorded of a batch: it stays on the device, and leaves when its rows have ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..traces.manifest import LogprobSpec
from .decoding import ChosenTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRow:
    """What was recorded of one row, on the CPU.

    Attributes:
        features: [n - 1, width]. top1: [n - 1] int64.
        chosen: tokens [m] of the continuation, and their log-probabilities.
    """

    features: Tensor
    top1: Tensor
    chosen: ChosenTokens


class KeptRows:
    """Buffers [R, longest, ...]: entry i of a row is what the target gave for its token i.

    Args:
        num_rows: R. longest: entries of a row.
        width: of the features.
        dtype: that they are computed in. stored: that they leave in.
        spec: which log-probabilities are kept.
        device: of the buffers.
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
    ) -> None:
        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_rows, longest, *shape), dtype=dtype, device=device)

        num_top = spec.num_top if spec else 0
        self._features = buffer(width, dtype=dtype)
        self._stored = stored
        self._top1 = buffer(dtype=torch.int64)
        self._token = buffer(dtype=torch.int64)
        self._logprob = buffer(dtype=torch.float32) if spec else None
        self._top_ids = buffer(num_top, dtype=torch.int64) if num_top else None
        self._top_logprobs = buffer(num_top, dtype=torch.float32) if num_top else None

    def read(self, row: int, start: int, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for tokens of a prompt: [t, width] and [t], from `start`."""
        entries = slice(start, start + len(top1))
        self._features[row, entries] = features.to(self._features.device)
        self._top1[row, entries] = top1

    def run(self, rows: Tensor, at: Tensor, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for one token each: [B, width] and [B], of these entries."""
        self._features[rows, at] = features.to(self._features.device)
        self._top1[rows, at] = top1

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
        fuse: Callable[[Tensor], Tensor] | None,
    ) -> list[LeftRow]:
        """Copy rows to the CPU, each kind of what was recorded in one go.

        Args:
            rows: to copy.
            entries: of each, from the last token of its prompt to the last that was read.
            fuse: made of the features of a row before; None = nothing.

        Returns:
            In the order of `rows`; on a GPU complete only when its stream has come so far.
        """
        ends = [(row, slice(0, some.stop)) for row, some in zip(rows, entries, strict=True)]
        behind = list(zip(rows, entries, strict=True))
        features = self._split(self._features, ends, fuse)
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
