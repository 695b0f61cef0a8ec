"""What a replay takes of a device's memory, known from headers before it starts.

Weights are counted to the byte; temporary memory of the passes is bounded from above.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...quantize.drafts import Row
from ...quantize.drafts.forward import BLOCK_ROWS, MAX_SCORES
from ...quantize.drafts.geometry import usual_draft_tokens
from ...quantize.drafts.maths import MAX_WIDENED
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.stored.decoded_numbers import read_rows
from ...quantize.stored.loading import BLOCK_BYTES, held_dtype
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes.errors import DeviceError
from ...recipes.formats import OnlineHead
from ..traces.prompt_trace import FEATURE_DTYPES
from ..traces.trace_folder import TraceFolder
from .devices import available_bytes
from .draft_inputs import MAX_TOKENS, batches_of
from .proposals import MAX_LOGITS

_DECODED = 8  # bytes that decoding holds at most per byte of a stored block


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """The weights of one draft: its own bytes, and bytes shared with the first draft."""

    name: str
    own: int
    common: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Upper bounds in bytes on what a replay takes, on top of what the process already holds."""

    device: torch.device
    drafts: tuple[DraftMemory, ...]
    tables: int
    reading: int
    passes: int
    max_tokens: int
    available: int | None

    @property
    def total(self) -> int:
        """The total; reading has ended when the passes begin."""
        weights = self.tables + sum(draft.own for draft in self.drafts)
        return weights + max(self.reading, self.passes)

    @property
    def fits(self) -> bool:
        """True if it fits, as far as is known."""
        return self.available is None or self.total <= self.available

    def beside_first(self, others: Sequence[DraftMemory]) -> "MemoryEstimate":
        """The estimate for the first draft and these."""
        return dataclasses.replace(self, drafts=(self.drafts[0], *others))

    @property
    def in_turn(self) -> "MemoryEstimate":
        """The estimate for the first draft and the largest other one: the least that is needed."""
        largest = sorted(self.drafts[1:], key=lambda draft: draft.own)[-1:]
        return self.beside_first(largest)

    def groups(self, most: int) -> list[range]:
        """Numbers of the drafts after the first that fit beside it together, `most` at a time.

        A draft that does not fit even alone forms its own group; `in_turn` tells.
        """
        groups: list[range] = []
        for number in range(1, len(self.drafts)):
            last = groups[-1] if groups else range(0)
            wider = range(last.start, number + 1)
            group = self.drafts[wider.start : wider.stop]
            if last and len(wider) <= most and self.beside_first(group).fits:
                groups[-1] = wider
            else:
                groups.append(range(number, number + 1))
        return groups

    def line(self) -> str:
        """The estimate for people, in decimal gigabytes."""
        weights = [
            f"{draft.name} {_gigabytes(draft.own)}"
            + (f" beside {_gigabytes(draft.common)} of the first's" if draft.common else "")
            for draft in self.drafts
        ]
        if self.tables:
            weights.append(f"tables of the target {_gigabytes(self.tables)}")
        left = "" if self.available is None else f" of {_gigabytes(self.available)} available"
        return (
            f"memory on {self.device}: {_gigabytes(self.total)} at most{left}: weights"
            f" {', '.join(weights)}; passes {_gigabytes(self.passes)}"
        )

    def check(self) -> None:
        """Refuse drafts that do not fit."""
        if self.fits:
            return
        raise DeviceError(
            f"--device {self.device}",
            f"replay needs {_gigabytes(self.total)} beside what is in use, and"
            f" {_gigabytes(self.available or 0)} are available",
            details=[f"  {self.line()}"],
            fix="use --dtype bfloat16 or --batch-size 1, replay one quantized draft at a"
            " time, or use a device with more memory",
        )


def estimate_replay(
    folders: Sequence[Path],
    traces: TraceFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_draft_tokens: int | None,
    batch_size: int | None,
    online_heads: Sequence[OnlineHead | None] = (),
    in_turn: bool = False,
) -> MemoryEstimate:
    """What `replay_drafts` will take with drafts that are loaded compactly, each like the first.

    Reads headers, and the first rows of tensors that two drafts may share.
    """
    stored = [StoredDraft.read(Checkpoint.open(folder)) for folder in folders]
    heads = online_heads or [None] * len(stored)
    held = [_DraftOnDisk(draft, dtype, head) for draft, head in zip(stored, heads, strict=True)]
    drafts = tuple(draft.weights(held[0] if i else None) for i, draft in enumerate(held))
    available = available_bytes(device)

    def with_batches(max_tokens: int) -> MemoryEstimate:
        batches = batches_of(traces.manifest.prompts, max_tokens=max_tokens, max_prompts=batch_size)
        return MemoryEstimate(
            device=device,
            drafts=drafts,
            tables=max(draft.tables() for draft in held),
            reading=_DECODED * BLOCK_BYTES,
            passes=max(draft.passes(traces, batches, num_draft_tokens) for draft in held),
            max_tokens=max_tokens,
            available=available,
        )

    estimate = with_batches(MAX_TOKENS)
    while batch_size is None and estimate.max_tokens > 1:
        if (estimate.in_turn if in_turn else estimate).fits:
            break
        estimate = with_batches(estimate.max_tokens // 2)
    return estimate


class _DraftOnDisk:
    def __init__(
        self, stored: StoredDraft, dtype: torch.dtype, online_head: OnlineHead | None
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._online_head = online_head
        self._rows = {row.canonical: row for row in stored.draft.rows}
        self.geometry = stored.draft.geometry

    def weights(self, first: "_DraftOnDisk | None") -> DraftMemory:
        g, common = self.geometry, 0
        # A head that vLLM quantizes while it loads, as computed here: in float32 at first.
        own_bytes = 4 * g.vocab_size * g.hidden_size if self._online_head else 0
        for row in self._rows.values():
            held = held_dtype(self._stored, row, self._dtype, compact=True)
            nbytes = row.tensor.numel * held.itemsize
            if first is not None and self._seems_held(row, first):
                common += nbytes
            else:
                own_bytes += nbytes
        return DraftMemory(name=self._stored.checkpoint.folder.name, own=own_bytes, common=common)

    def tables(self) -> int:
        """Bytes of an embedding and head that are not stored, as if the target had BF16."""
        g = self.geometry
        rows = {"embed_tokens.weight": g.vocab_size, "lm_head.weight": g.draft_vocab_size}
        if not self._stored.draft.family.shared_tables:
            return 0
        absent = (count for name, count in rows.items() if name not in self._rows)
        return sum(absent) * g.hidden_size * 2

    def passes(
        self, traces: TraceFolder, batches: Sequence[Sequence[int]], num_draft_tokens: int | None
    ) -> int:
        """What the passes over the largest of some batches hold at once."""
        entries = traces.manifest.prompts
        features, g = traces.manifest.features, self.geometry
        num_draft_tokens = num_draft_tokens or usual_draft_tokens(g)
        wide = torch.promote_types(self._dtype, torch.float32).itemsize
        linears = [r for r in self._rows.values() if r.role in ("attention", "mlp", "kv_up")]
        per_row = sum(sum(row.tensor.shape) for row in linears) // g.num_layers * wide
        attention = (r.tensor.shape[0] for r in linears if r.role == "attention")
        keys = 2 * max(attention, default=0) * wide
        most = 0
        for batch in batches:
            tokens = max(entries[i].num_tokens for i in batch)
            every = len(batch) * tokens
            rows = len(batch) * min(tokens, BLOCK_ROWS)
            scores = min(3 * MAX_SCORES, 3 * len(batch) * g.num_attention_heads * tokens**2)
            logits = min(MAX_LOGITS, rows * g.draft_vocab_size)
            # This batch and the next one, as read and as padded; and widened.
            read = features.width * (4 * FEATURE_DTYPES[features.dtype][0].itemsize + wide)
            held = every * (read + 2 * g.hidden_size * wide)
            held += rows * per_row + (every * g.num_layers + rows * num_draft_tokens) * keys
            most = max(most, held + (scores + 2 * logits + MAX_WIDENED) * wide)
        return most

    def _seems_held(self, row: Row, first: "_DraftOnDisk") -> bool:
        other = first._rows.get(row.canonical)
        if other is None or self._stored.is_quantized(row) or first._stored.is_quantized(other):
            return False
        mine, its = row.tensor, other.tensor
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return False
        some = max(1, math.isqrt(mine.shape[0])) if mine.shape else 1
        ours = read_rows(self._stored.checkpoint, mine, 0, some)
        return bool((ours == read_rows(first._stored.checkpoint, its, 0, some)).all())


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
