"""Continuing prompts with a target: rows leave the batch as they end, and new ones enter."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..prompts.prompt_file import Prompt
from ..traces.prompt_trace import PromptTrace
from .decoding import LONG_TEXT, Decoding, Fuse, KeptOutputs, choose, continued, prompt_draws
from .target_model import Ran, RecordedTarget

Together = Literal["any lengths", "equal prompts", "equal lengths"]
"""What a target can continue together: prompts of any lengths; of any lengths, though only equal
ones are read together (recurrent states would include padding); or only of equal lengths."""

_MAX_PADDING = 1 / 8  # share of what is read together
_REFILL, _SHRINK = 1 / 8, 1 / 4
"""Shares of ended rows at which new prompts are read, and at which the others move together."""


class Waiting:
    """Prompts that wait for a row, the longest first.

    So a batch that does not fit into memory fails at once, and a new prompt is never longer than
    the rows that it joins.
    """

    def __init__(self, lengths: Sequence[int], together: Together, max_tokens: int) -> None:
        self._lengths = lengths
        self._together = together
        self._max_tokens = max_tokens
        self._order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def __len__(self) -> int:
        return len(self._order)

    def entering(self, free: int) -> list[list[int]]:
        """Positions of the prompts for free rows, by groups that are read together."""
        first, lengths = self._order[:free], self._lengths
        if self._together == "equal lengths":
            first = [i for i in first if lengths[i] == lengths[first[0]]]
        self._order = self._order[len(first) :]
        return list(self._groups(first))

    def _groups(self, entering: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        for i in entering:
            if group and not self._fits(i, group):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _fits(self, candidate: int, group: Sequence[int]) -> bool:
        if self._together == "equal lengths":
            return True  # with one cache: what is too long is read in pieces
        read = self._lengths[group[0]] * (len(group) + 1)
        tokens = sum(self._lengths[i] for i in group) + self._lengths[candidate]
        padding = _MAX_PADDING if self._together == "any lengths" else 0
        return read <= self._max_tokens and read - tokens <= padding * read


def give_way(num_ended: int, num_rows: int, num_waiting: int, together: Together) -> bool:
    """Whether so many of the rows have ended that they leave now."""
    if num_ended == num_rows or together == "equal lengths":
        return num_ended == num_rows
    return num_ended >= num_rows * (_REFILL if num_waiting else _SHRINK)


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """A row: the prompt's position and length, its limit of new tokens, and its tokens so far.

    While a prompt is read, `length` is of what was read of it; a row of length 0 is free.
    """

    position: int = -1
    length: int = 0
    limit: int = 0
    num_new: int = 0
    ended: bool = False

    @property
    def num_read(self) -> int:
        """Tokens of it that the target has read."""
        return self.length + self.num_new - 1


@dataclass(slots=True, kw_only=True)
class RowsOnDevice:
    """The rows' state where the target runs, [R] each."""

    slot: Tensor
    at: Tensor  # the entry of the next token
    last: Tensor  # where an ended row stays
    first: Tensor
    unread: Tensor
    ended: Tensor
    draws: Tensor | None  # [R, limit + 1], None where greedy

    def select(self, rows: Tensor) -> "RowsOnDevice":
        """The state of some rows."""
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            state = getattr(self, field.name)
            kept[field.name] = None if state is None else state[rows]
        return RowsOnDevice(**kept)


MAX_LOGITS = 2**26  # elements of one logits tensor while reading prompts: 256 MB in float32
MAX_MASK = 2**25
"""Elements of the mask of a piece of a long prompt: 128 MB in float32, as attention adds it."""
_LOOK_EVERY = {"cpu": 1, "cuda": 8}
"""Runs between two checks for ended rows: a device that runs ahead would wait for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Prompts that were continued to their end."""

    traces: tuple[tuple[int, PromptTrace], ...]
    wait: Callable[[], None]


class Continuing:
    """One run over some prompts, with at most `batch_size` rows.

    Their features leave as `fuse` returns them, in the dtype `stored`, None = the target's; for
    long texts they are on disk in the folder `spool` meanwhile, None = in memory.
    """

    def __init__(
        self,
        target: RecordedTarget,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        decoding: Decoding,
        *,
        together: Together,
        batch_size: int,
        fuse: Fuse | None = None,
        stored: torch.dtype | None = None,
        spool: Path | None = None,
    ) -> None:
        self._target, self._prompts, self._limits = target, prompts, limits
        self._decoding, self._together = decoding, together
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self._waiting = Waiting(lengths, together, MAX_LOGITS // target.config.vocab_size)
        self._batch_size = min(batch_size, len(prompts))
        self._kept = KeptOutputs(
            self._batch_size,
            max(length + limit for length, limit in zip(lengths, limits, strict=True)),
            width=target.width,
            dtype=target.model.dtype,
            stored=stored or target.model.dtype,
            spec=decoding.logprob_spec,
            device=target.device,
            fuse=fuse,
            spool=spool,
        )
        self._ends = target.ends[:0] if decoding.ignore_eos else target.ends
        self._ends_on_device = self._ends.to(target.device)
        self._look_every = _LOOK_EVERY.get(target.device.type, 1)
        self._num_runs = 0
        self.rows: list[RunningRow] = []
        self.cache: Any = None

    @torch.inference_mode()
    def run(self, on_run: Callable[[Sequence[RunningRow]], None]) -> Iterator[Left]:
        """Continue all of them; `on_run` hears of the rows after each run of the target."""
        self._on_run = on_run
        while self.rows or len(self._waiting):
            if not self.rows:
                self._open()
            while True:
                ended = [r for r, row in enumerate(self.rows) if row.ended]
                waiting = len(self._waiting)
                if ended and give_way(len(ended), len(self.rows), waiting, self._together):
                    break
                self._step()
            yield self._leave(ended)
            self._refill(ended)

    # ---- rows enter and leave

    def _open(self) -> None:
        groups = self._waiting.entering(self._batch_size)
        count = sum(map(len, groups))
        self.cache = None
        self._slots = list(range(count))
        zeros = torch.zeros(count, dtype=torch.int64, device=self._target.device)
        draws = None
        if self._decoding.sampled:
            draws = zeros.new_zeros((count, max(self._limits) + 1), dtype=torch.float64)
        self._state = RowsOnDevice(
            slot=torch.arange(count, device=zeros.device),
            at=zeros,
            last=zeros.clone(),
            first=zeros.clone(),
            unread=zeros.clone(),
            ended=zeros.bool(),
            draws=draws,
        )
        self.rows = [RunningRow() for _ in range(count)]
        self._enter(groups, list(range(count)))

    def _enter(self, groups: Sequence[Sequence[int]], free: Sequence[int]) -> None:
        places = iter(free)
        for group in groups:
            self._read(group, [next(places) for _ in group])

    def _leave(self, ended: Sequence[int]) -> Left:
        slots = [self._slots[r] for r in ended]
        tokens = self._kept.continuations(slots)
        entries = []
        for r, ids in zip(ended, tokens, strict=True):
            first = self.rows[r].length - 1
            new = ids[first : first + self.rows[r].limit]
            ends = torch.isin(new, self._ends).nonzero()
            entries.append(slice(first, first + (int(ends[0]) + 1 if len(ends) else len(new))))
        left = self._kept.leave(slots, entries)
        traces = tuple(
            (place := self.rows[r].position, continued(self._prompts[place], **kept))
            for r, kept in zip(ended, left, strict=True)
        )
        if self._target.device.type != "cuda":
            return Left(traces=traces, wait=lambda: None)
        event = torch.cuda.current_stream(self._target.device).record_event()
        return Left(traces=traces, wait=event.synchronize)

    def _refill(self, ended: Sequence[int]) -> None:
        gone = set(ended)
        staying = [r for r in range(len(self.rows)) if r not in gone]
        if not staying:
            self.rows = []
            return
        groups = self._waiting.entering(len(ended))
        entering = ended[: sum(map(len, groups))]
        if len(entering) < len(ended):
            staying = sorted([*staying, *entering])
            kept = torch.tensor(staying, device=self._target.device)
            self.rows = [self.rows[r] for r in staying]
            entering = [staying.index(r) for r in entering]
            self._slots = [self._slots[r] for r in staying]
            self._state = self._state.select(kept)
            self.cache.keep(kept)
        going = [row for r, row in enumerate(self.rows) if r not in set(entering)]
        self.cache.trim(max(row.num_read for row in going))
        for row in entering:
            self.rows[row] = RunningRow()
        self._enter(groups, entering)

    # ---- the target runs

    def _read(self, group: Sequence[int], rows: Sequence[int]) -> None:
        """Read prompts, put them into rows, and choose the first token of each."""
        from transformers import DynamicCache

        target, device = self._target, self._target.device
        prompts = [self._prompts[i].token_ids for i in group]
        longest = max(map(len, prompts))
        before = [longest - len(prompt) for prompt in prompts]  # columns of padding
        token_ids = torch.tensor(
            [[0] * pad + list(p) for pad, p in zip(before, prompts, strict=True)]
        )
        token_ids = token_ids.to(device)
        columns = torch.arange(longest, device=device)
        positions = columns - torch.tensor(before, device=device)[:, None]
        padding = positions < 0 if any(before) else None
        read = DynamicCache(config=target.model.config)
        piece = max(1, MAX_LOGITS // (len(group) * target.config.vocab_size))
        if longest > LONG_TEXT:
            piece = min(piece, max(1, MAX_MASK // (len(group) * longest)))
        at = torch.tensor(rows, device=device)
        for row, position in zip(rows, group, strict=True):
            self.rows[row] = RunningRow(position=position, limit=self._limits[position])
        for begin in range(0, longest, piece):
            some, given = slice(begin, begin + piece), {}
            if padding is not None:
                given = {"attention_mask": (~padding[:, : some.stop]).long(),
                         "position_ids": positions[:, some].clamp(min=0)}  # fmt: skip
            ran = target.run(token_ids[:, some], read, given)
            for i, (row, pad) in enumerate(zip(rows, before, strict=True)):
                skipped = max(0, pad - begin)
                if skipped < ran.top1.shape[1]:
                    start, slot = begin + skipped - pad, self._slots[row]
                    self._kept.read(slot, start, ran.features[i, skipped:], ran.top1[i, skipped:])
                    self.rows[row].length = start + ran.top1.shape[1] - skipped
            self._on_run(self.rows)
        self._take(read, at, padding, longest)
        for row, prompt in zip(rows, prompts, strict=True):
            self._begin(row, prompt)
        self._choose(at, self._state.first[at], ran)
        self._look()

    def _take(self, read: Any, rows: Tensor, padding: Tensor | None, longest: int) -> None:
        if self._together == "equal lengths":
            self.cache = read
            return
        from .slot_cache import SlotCache

        if self.cache is None:
            self.cache = SlotCache(read, len(self.rows))
            self.cache.restart(longest)
        self.cache.admit(read, rows, padding)

    def _begin(self, row: int, prompt: Sequence[int]) -> None:
        state, length, limit = self._state, len(prompt), self.rows[row].limit
        self.rows[row].num_new = 1
        state.at[row], state.first[row], state.last[row] = length, length - 1, length + limit - 1
        state.ended[row] = False
        if state.draws is not None:
            state.draws[row, :limit] = prompt_draws(self._decoding, prompt, limit)

    def _step(self) -> None:
        state, given = self._state, {}
        at = torch.minimum(state.at, state.last)
        cache = self.cache
        if self._together != "equal lengths":
            cache, given = cache.cache, {"position_ids": at[:, None]}
            mask = self._mask()
            if mask is not None:
                given["attention_mask"] = mask
        ran = self._target.run(state.unread[:, None], cache, given)
        self._kept.run(state.slot, at, ran.features[:, 0], ran.top1[:, 0])
        self._choose(slice(None), at, ran)
        state.at += 1
        for row in self.rows:
            row.num_new += 1
        self._look()
        self._on_run(self.rows)

    def _mask(self) -> Tensor | None:
        columns = self.cache.num_columns
        if all(row.num_read == columns for row in self.rows):
            return None
        first = (columns - self._state.at)[:, None]
        seen: Tensor = torch.arange(columns + 1, device=first.device) >= first
        if self.cache.one_mask and self._target.config._attn_implementation == "sdpa":
            return seen[:, None, None]  # as in transformers, but no GPU waits for it
        return seen.long()

    def _choose(self, rows: Tensor | slice, at: Tensor, ran: Ran) -> None:
        state, draws = self._state, None
        if state.draws is not None:
            number = (at - state.first[rows])[:, None]
            draws = state.draws[rows].gather(1, number)[:, 0]
        chosen = choose(self._decoding, ran.last_logits, ran.top1[:, -1], draws)
        self._kept.chose(state.slot[rows], at, chosen)
        state.unread[rows] = chosen["token_ids"]
        if len(self._ends):
            state.ended[rows] |= torch.isin(chosen["token_ids"], self._ends_on_device)

    def _look(self) -> None:
        """Note which rows have ended: by their limit always, by an end of text now and then."""
        self._num_runs += 1
        for row in self.rows:
            row.ended = row.ended or row.num_new >= row.limit
        if len(self._ends) and self._num_runs % self._look_every == 0:
            for row, ended in zip(self.rows, self._state.ended.tolist(), strict=True):
                row.ended = row.ended or ended
