"""Which traces codes are learned from, in which order, and which ones are held back to judge them.

Nothing here depends on the order in which a folder lists its prompts.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...quantize.drafts.forward import whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..errors import CalibrationError
from ..passes.draft_inputs import first_hidden
from ..traces.manifest import TraceEntry
from ..traces.near_duplicates import independent_groups, prompt_text
from ..traces.trace_folder import TraceFolder

MIN_GROUPS = 4
"""Of prompts that are independent of each other: at least one is held back, and three are not."""
MAX_SLOTS = 128
"""Rows of a chain, or slots of all blocks, that one sequence is looked at in a step."""
MAX_VALIDATION_SLOTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSequence:
    """One trace as a draft reads it.

    Attributes:
        hidden: [1, N - 1, W]. token_ids: [1, N] int64. Both on the draft's device.
        rows: R of the trace, evenly spaced, whose chains or blocks are looked at.
    """

    hidden: Tensor
    token_ids: Tensor
    rows: range


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """The prompts of a trace folder, those to learn from and those held back.

    Attributes:
        learned, held_back: both ordered by what they say, whatever they are called.
    """

    learned: tuple[TraceEntry, ...]
    held_back: tuple[TraceEntry, ...]


def split_prompts(
    traces: TraceFolder, num_draft_tokens: int, *, share: float, seed: int, min_learned: int = 0
) -> PromptSplit:
    """Hold some prompts back: whole conversations, with their copies and near duplicates.

    Args:
        traces: for calibration.
        num_draft_tokens: K; prompts without a row of K predictions are of no use and left out.
        share: of the prompts to hold back, rounded up to whole groups that belong together.
        seed: with which the prompts' hashes are hashed, to draw them.
        min_learned: prompts that must be left to learn from.

    Raises:
        CalibrationError: fewer than four groups of prompts that are independent of each other, or
            too few prompts to learn from.
    """
    entries, texts = [], []
    for entry, trace in zip(traces.manifest.prompts, traces, strict=True):
        if whole_rows(trace.num_tokens, num_draft_tokens, first_row=trace.prompt_length - 1):
            entries.append((_drawn(seed, trace.token_ids.tolist()), entry))
            texts.append(prompt_text(trace))
    groups = [sorted(entries[i] for i in group) for group in independent_groups(texts)]
    if len(groups) < MIN_GROUPS:
        raise CalibrationError(
            traces.folder,
            f"expected at least {MIN_GROUPS} independent prompts with continuations"
            f" longer than {num_draft_tokens} tokens, some to learn from and some to"
            f" validate on, got {len(groups)}",
            fix="record more prompts: at least 48 are recommended",
        )
    groups.sort(key=lambda group: group[0][0])
    wanted = max(1, round(share * len(entries)))
    held_back: list[TraceEntry] = []
    learned: list[TraceEntry] = []
    for place, group in enumerate(groups):
        side = held_back if len(held_back) < wanted and place < len(groups) - 1 else learned
        side += [entry for _, entry in group]
    if len(learned) < min_learned:
        raise CalibrationError(
            traces.folder,
            f"expected at least {min_learned} prompts to learn from, got {len(learned)},"
            f" with {len(held_back)} more held back for validation. Fine-tuning on fewer"
            " overfits: the draft accepts less on all other prompts (2.71 % less,"
            " measured with 8)",
            fix=f"record more prompts: {math.ceil(min_learned / (1 - share))} or more",
        )
    return PromptSplit(learned=tuple(learned), held_back=tuple(held_back))


def chosen_prompts(
    prompts: Sequence[TraceEntry], step: int, *, count: int, seed: int
) -> Iterator[TraceEntry]:
    """The prompts of one step: all are seen before one is seen again, each time in another order.

    Args:
        prompts: to learn from.
        step: from 0 on.
        count: prompts of a step.
        seed: of the orders.
    """
    for place in range(step * count, (step + 1) * count):
        epoch, within = divmod(place, len(prompts))
        order = random.Random(f"{seed}:{epoch}").sample(range(len(prompts)), len(prompts))
        yield prompts[order[within]]


def training_rows(entry: TraceEntry, num_draft_tokens: int, per_row: int, draw: str) -> range:
    """Evenly spaced rows of a continuation, at most `MAX_SLOTS` with `per_row` slots each.

    Args:
        entry: of a prompt with at least one whole row.
        num_draft_tokens: K.
        per_row: slots of a row: 1 in a chain, the whole block in a block.
        draw: text that says where the first of them lies.
    """
    rows = whole_rows(entry.num_tokens, num_draft_tokens, first_row=entry.prompt_length - 1)
    step = -(-len(rows) * per_row // MAX_SLOTS)
    return rows[random.Random(draw).randrange(min(step, len(rows))) :: step]


def validation_rows(entry: TraceEntry, num_draft_tokens: int, per_row: int) -> range:
    """Evenly spaced rows from the first one on, none to `MAX_VALIDATION_SLOTS` slots."""
    rows = whole_rows(entry.num_tokens, num_draft_tokens, first_row=entry.prompt_length - 1)
    return rows[:: max(1, -(-len(rows) * per_row // MAX_VALIDATION_SLOTS))]


def read_sequence(
    draft: LoadedDraft, traces: TraceFolder, entry: TraceEntry, rows: range
) -> LearningSequence:
    """What a draft reads of a prompt.

    Raises:
        TraceError: the trace is damaged, or the draft has no embedding of a token.
    """
    trace = traces.load(entry)
    return LearningSequence(
        hidden=first_hidden(draft, traces, trace)[None],
        token_ids=trace.token_ids[None].to(draft.device),
        rows=rows,
    )


def _drawn(seed: int, token_ids: Sequence[int]) -> str:
    """A number drawn for a trace, in hex: it depends on what the trace says and on the seed."""
    return hashlib.sha256(f"{seed}:{token_ids}".encode()).hexdigest()
