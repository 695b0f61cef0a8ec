"""Which traces codes are learned from, in which order, and which are held out to judge them.

Nothing here depends on the order in which a folder lists its prompts.
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import CalibrationError
from ..passes.draft_inputs import filled_up, first_hidden, rows_along
from ..traces.manifest import TraceEntry
from ..traces.related_prompts import prompt_text, related_groups
from ..traces.trace_folder import TraceFolder

MIN_GROUPS = 4
"""Least number of independent prompts: at least one is held out, and three are not."""
MAX_SLOTS = 128  # rows of a chain, or slots of all blocks, that a step uses of one sequence
MAX_VALIDATION_SLOTS = 1024
HELD_BYTES = 1 << 30
"""Bytes of what a draft reads from traces, kept on its device after the first read."""
_FILLED_UP = 1.25
"""Most tokens of padding of prompts that go through a draft together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSequences:
    """Some traces as a draft reads them together, the shorter ones padded at the end."""

    hidden: Tensor  # [B, N - 1, W], on the draft's device, as are token ids
    token_ids: Tensor  # [B, N] int64
    rows: range  # evenly spaced, those that are used
    inside: tuple[range, ...]  # those of them inside each trace, at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """The prompts to learn from and those held out, ordered by their contents."""

    learned: tuple[TraceEntry, ...]
    held_back: tuple[TraceEntry, ...]


def split_prompts(
    traces: TraceFolder, num_draft_tokens: int, *, share: float, seed: int
) -> PromptSplit:
    """Hold some prompts out: whole conversations, with their copies and near duplicates."""
    entries, texts = [], []
    for entry, trace in zip(traces.manifest.prompts, traces, strict=True):
        if rows_along(entry, num_draft_tokens):
            # Drawn by the contents of the trace and by the seed, in hex.
            drawn = hashlib.sha256(f"{seed}:{trace.token_ids.tolist()}".encode()).hexdigest()
            entries.append((drawn, entry))
            texts.append(prompt_text(trace))
    groups = [sorted(entries[i] for i in group) for group in related_groups(texts)]
    if len(groups) < MIN_GROUPS:
        raise CalibrationError(
            traces.folder,
            f"expected at least {MIN_GROUPS} independent prompts with continuations longer than"
            f" {num_draft_tokens} tokens, some to learn from and some to validate on, got"
            f" {len(groups)}",
            fix="record more prompts: at least 48 are recommended",
        )
    groups.sort(key=lambda group: group[0][0])
    wanted = max(1, round(share * len(entries)))
    held_back: list[TraceEntry] = []
    learned: list[TraceEntry] = []
    for place, group in enumerate(groups):
        side = held_back if len(held_back) < wanted and place < len(groups) - 1 else learned
        side += [entry for _, entry in group]
    return PromptSplit(learned=tuple(learned), held_back=tuple(held_back))


def chosen_prompts(
    prompts: Sequence[TraceEntry], step: int, *, count: int, seed: int
) -> Iterator[TraceEntry]:
    """The prompts of a step: all are used before one is used again, each time in another order."""
    for place in range(step * count, (step + 1) * count):
        epoch, within = divmod(place, len(prompts))
        order = random.Random(f"{seed}:{epoch}").sample(range(len(prompts)), len(prompts))
        yield prompts[order[within]]


def training_rows(entry: TraceEntry, num_draft_tokens: int, per_row: int, draw: str) -> range:
    """Evenly spaced rows of a continuation, at most `MAX_SLOTS` with `per_row` slots each.

    They are 1, 2, 4, ... apart, and on one grid for prompts with the same `draw`, so that these can
    go through a draft together.
    """
    rows = rows_along(entry, num_draft_tokens)
    step = 1
    while step < len(rows) and -(-len(rows) // step) * per_row > MAX_SLOTS:
        step *= 2
    drawn = random.Random(draw).randrange(2**16) - rows.start
    return rows[drawn % step :: step] or rows[-1:]


def validation_rows(entry: TraceEntry, num_draft_tokens: int, per_row: int) -> range:
    """Evenly spaced rows from the first one on, up to `MAX_VALIDATION_SLOTS` slots."""
    rows = rows_along(entry, num_draft_tokens)
    return rows[:: max(1, -(-len(rows) * per_row // MAX_VALIDATION_SLOTS))]


def run_together(
    entries: Sequence[TraceEntry], rows: Sequence[range], *, max_tokens: int
) -> list[list[int]]:
    """Positions of prompts to run together: their rows lie on one grid, and lengths are similar."""
    grids: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, span in enumerate(rows):
        grids[span.step, span.start % span.step].append(i)
    batches = []
    for grid in grids.values():
        batch: list[int] = []
        filled = own_tokens = 0
        for i in sorted(grid, key=lambda i: entries[i].num_tokens):
            tokens = entries[i].num_tokens
            filled, own_tokens = (len(batch) + 1) * tokens, own_tokens + tokens
            if batch and (filled > max_tokens or filled > _FILLED_UP * own_tokens):
                batches.append(batch)
                batch, own_tokens = [], tokens
            batch.append(i)
        batches.append(batch)
    return batches


class SequenceReader:
    """What a draft reads from prompts, on its device: read once, as far as it can be held."""

    def __init__(self, draft: LoadedDraft, traces: TraceFolder) -> None:
        self._draft, self._traces = draft, traces
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        self._left = HELD_BYTES

    def read(self, entries: Sequence[TraceEntry], rows: Sequence[range]) -> LearningSequences:
        """Prompts together, whose rows lie on one grid."""
        loaded = [self._prompt(entry) for entry in entries]
        longest = max(len(token_ids) for _, token_ids in loaded)
        first, last = min(r[0] for r in rows), max(r[-1] for r in rows)
        return LearningSequences(
            hidden=torch.stack([filled_up(hidden, longest - 1) for hidden, _ in loaded]),
            token_ids=torch.stack([filled_up(token_ids, longest) for _, token_ids in loaded]),
            rows=range(first, last + 1, rows[0].step),
            inside=tuple(rows),
        )

    def _prompt(self, entry: TraceEntry) -> tuple[Tensor, Tensor]:
        """[N - 1, W] and [N] int64."""
        if entry.id in self._held:
            return self._held[entry.id]
        trace = self._traces.load(entry)
        hidden = first_hidden(self._draft, self._traces, trace)
        token_ids = trace.token_ids.to(self._draft.device)
        if hidden.nbytes <= self._left:
            self._left -= hidden.nbytes
            self._held[entry.id] = hidden, token_ids
        return hidden, token_ids
