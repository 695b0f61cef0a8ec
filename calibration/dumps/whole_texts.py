"""Whole texts of a dump, recomputed by the target: which rows are those of their own positions.

`recomputed` finds the layers in the beginnings of a few texts. Rows that are late by one from the
middle of a text on, or that belong to another text, show only where they lie; so positions are
counted, over whole texts.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import TraceError
from ..passes.predictions import MAX_LOGITS
from ..recording.recorded_target import RecordedTarget
from ..recording.target_model import ON_CPU, decoder_layers, loaded_target
from ..traces.prompt_trace import FEATURE_DTYPES
from .recomputed import RecomputedFinding, slots_of
from .sample import TEXT_AGAIN, Pending, Sample

MAX_WORK = 3e13
"""Tokens times bytes of the target's weights: about as many operations in BF16, some five minutes
on two cores. Of a dump that needs more, one text in so many is recomputed."""
MAX_DIFFERENCE = 0.5
"""Relative, at one position. Rows of other tokens differ by about 1, other arithmetic by 0.02."""
MAX_OTHER_ROWS = 0.001
"""Share of a text's positions, and one more: a target may choose other experts at a few."""


@dataclass(slots=True)
class RowCounts:
    """Of `num_seen` texts `num_texts` were recomputed; `num_other` positions hold other rows."""

    num_seen: int = 0
    num_texts: int = 0
    num_positions: int = 0
    num_other: int = 0


class WholeTexts:
    """Counts positions of the texts that go by; made by `recomputing`."""

    def __init__(self, target: RecordedTarget, found: RecomputedFinding, every: int) -> None:
        self._target, self._found, self._every = target, found, every
        self._counts = RowCounts()
        self._refused: list[tuple[Path, str]] = []

    def add(self, sample: Sample, stop: int) -> None:
        """Take in the next text, of which the tokens before `stop` are used."""
        counts = self._counts
        counts.num_seen += 1
        if (counts.num_seen - 1) % self._every:
            return
        token_ids, shift = sample.token_ids[:stop], self._found.shift
        computed = self._computed(token_ids)
        width = computed.shape[1] // len(self._found.layer_ids)
        slots, layers = (slots_of(x, width).float() for x in (sample.aux, computed))
        tokens = torch.arange(max(shift, 0), len(token_ids) + min(shift, 0))
        other = _differs(slots[tokens - shift], layers[tokens])
        wrong, which = tokens[other.any(dim=1)], other.any(dim=0)
        counts.num_texts += 1
        counts.num_positions += len(tokens)
        counts.num_other += len(wrong)
        if len(wrong) > 1 + MAX_OTHER_ROWS * len(tokens):
            ids = torch.tensor(self._found.layer_ids)[which].tolist()
            what = (
                f"at {len(wrong)} of {len(tokens)} positions, {int(wrong[0])} to {int(wrong[-1])},"
                f" the hidden states of layers {ids} are not what the target computes there, but"
                f" {_whose(slots[wrong - shift][:, which], layers[:, which], wrong)}"
            )
            self._refused.append((sample.file, what))

    @torch.inference_mode()
    def _computed(self, token_ids: Tensor) -> Tensor:
        """[N, m * W], read in pieces whose logits fit into memory."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._target.model.config)
        pieces = torch.split(token_ids, max(1, MAX_LOGITS // self._target.config.vocab_size))
        return torch.cat([self._target.run(some[None], cache, {}).features[0] for some in pieces])

    def counts(self) -> RowCounts:
        """Of all texts.

        Raises:
            TraceError: a text holds other rows; the others that do are named too.
        """
        if self._refused:
            (file, what), *more = self._refused
            if more:
                names = ", ".join(other.name for other, _ in more[:8])
                what += (
                    f"; and in {len(more)} of the {self._counts.num_texts - 1} other texts that"
                    f" were recomputed: {names}{', ...' if len(more) > 8 else ''}"
                )
            raise TraceError(file, what, fix=TEXT_AGAIN)
        return self._counts


@contextmanager
def recomputing(
    target: Path, found: RecomputedFinding, pendings: Sequence[Pending], first: Sample
) -> Iterator[WholeTexts]:
    """Load the target to recompute all texts, or one in so many if `MAX_WORK` does not do for all.

    Args:
        pendings: all texts; how long they are is estimated by the sizes of their files.
        first: of these, read.
    """
    weights = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    sizes = [pending.file.stat().st_size for pending in pendings]
    num_tokens = len(first.token_ids) * sum(sizes) / sizes[0]
    dtype, _ = FEATURE_DTYPES[found.dtype]
    with (
        loaded_target(target, dtype, ON_CPU, beside=target) as model,
        RecordedTarget(
            model, decoder_layers(model, target), found.layer_ids, last_state=False
        ) as recorded,
    ):
        every = math.ceil(num_tokens * weights / MAX_WORK)
        yield WholeTexts(recorded, found, max(every, 1))


def _differs(slots: Tensor, layers: Tensor) -> Tensor:
    """[N, m] bool of rows [N, m, W]."""
    off: Tensor = (slots - layers).norm(dim=2) / layers.norm(dim=2).clamp(min=1e-9)
    return off > MAX_DIFFERENCE


def _whose(rows: Tensor, layers: Tensor, tokens: Tensor) -> str:
    """What the target computes elsewhere and these rows [n, m, W] hold, in words."""
    for late in (1, 2, -1, -2):
        there = tokens - late
        inside = (there >= 0) & (there < len(layers))
        same = ~_differs(rows[inside], layers[there[inside]]).any(dim=1)
        if int(same.sum()) > 0.9 * len(rows):
            steps = f"{abs(late)} position{'s' if abs(late) > 1 else ''}"
            return f"what it computes {steps} {'earlier' if late > 0 else 'later'}"
    return "zeros" if not bool(rows.any()) else "those of other tokens"
