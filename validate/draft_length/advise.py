"""Which number of draft tokens is fastest at each concurrency, and which others may be, by prompts.

A number is worth its acceptance length / (drafting + verify step). The times are an estimate's and
taken as they are; acceptance is of a sample of prompts, so that numbers are compared by the
jackknife over distinct prompts, as the gate compares drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...quantize.estimate.draft_length import LengthAdvice, LengthPoint
from ...quantize.estimate.draft_round import draft_round
from ...quantize.estimate.step_estimate import Candidate, Estimate
from ...quantize.estimate.target import MeasuredStep, Target
from ...quantize.estimate.work import Machine, Round
from ..counting.jackknife import Floats
from ..counting.paired_change import jackknife_bounds
from ..errors import CompareError
from .recorded_lengths import RecordedDraft, RecordedLength

CONFIDENCE = 0.95
"""One-sided, of the bound by which another number of draft tokens may be as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """L numbers of draft tokens on N distinct prompts; where nothing is drafted, a token a step."""

    lengths: tuple[RecordedLength | None, ...]
    tokens: Floats
    steps: Floats

    @property
    def numbers(self) -> tuple[int, ...]:
        """[L] of draft tokens that are verified."""
        return tuple(length.num_draft_tokens if length else 0 for length in self.lengths)

    @property
    def acceptance_lengths(self) -> Floats:
        """[L]."""
        found: Floats = self.tokens.sum(-1) / self.steps.sum(-1)
        return found


def advise_lengths(
    estimate: Estimate,
    machines: Sequence[Machine],
    concurrencies: Sequence[int],
    recorded: Mapping[str, RecordedDraft],
    target_at: Callable[[int], Target | None],
) -> tuple[LengthAdvice, ...]:
    """For every form of the draft, on every GPU, at every concurrency whose verify step is known.

    Args:
        estimate: of the draft and its forms.
        machines: the GPUs.
        concurrencies: ascending.
        recorded: name of a form -> what it was measured to accept; a form that is not there
            accepts what the draft as it is does, which is there.
        target_at: the target's verify step for a number of draft tokens; None = not known.

    Returns:
        Nothing where nothing was measured.

    Raises:
        CompareError: the target is not known, or fewer than two distinct prompts have verify steps.
    """
    if not recorded:
        return ()
    if (target := target_at(1)) is None:
        raise CompareError(
            "--acceptance",
            "says how much drafting is worth beside the target's verify step, which is not known",
            fix="give --target-step-ms, --target or --target-bytes as well",
        )
    measured = isinstance(target, MeasuredStep)
    found = []
    for one in estimate.candidates:
        own = one.name in recorded
        counted = _counted(recorded[one.name if own else estimate.baseline.name], measured)
        rounds = _rounds(estimate, one, counted)
        steps = {k: target_at(k) for k in counted.numbers}
        for machine in machines:
            for concurrency in concurrencies:
                points = _points(machine, concurrency, counted, rounds, steps)
                if points:
                    found.append(_advice(one.name, own, machine, concurrency, points, counted))
    return tuple(found)


def _rounds(estimate: Estimate, one: Candidate, counted: _Counted) -> Mapping[int, Round]:
    """Number of proposals -> the round that drafts them."""
    settings: dict[str, Any] = {
        "context": estimate.context,
        "tp": estimate.tp,
        "kv_cache": one.form.cache,
    }
    weights = one.form.weights
    return {
        k: draft_round(one.form.draft, weights, num_draft_tokens=k, **settings)
        for k in {length.drafted for length in counted.lengths if length is not None}
    }


def _points(
    machine: Machine,
    concurrency: int,
    counted: _Counted,
    rounds: Mapping[int, Round],
    targets: Mapping[int, Target | None],
) -> list[LengthPoint]:
    points = []
    of_each = zip(counted.lengths, counted.numbers, counted.acceptance_lengths, strict=True)
    for length, k, accepted in of_each:
        target = targets[k]
        verify = target.verify_seconds(machine, concurrency) if target else None
        if verify is None:
            return []
        whole = rounds[length.drafted] if length else None
        points.append(
            LengthPoint(
                num_draft_tokens=k,
                drafted=length.drafted if length else 0,
                acceptance_length=float(accepted),
                drafting_seconds=machine.round_seconds(whole, concurrency) if whole else 0.0,
                verify_seconds=verify,
            )
        )
    return points


def _advice(
    form: str,
    own: bool,
    machine: Machine,
    concurrency: int,
    points: Sequence[LengthPoint],
    counted: _Counted,
) -> LengthAdvice:
    best = max(range(len(points)), key=lambda i: points[i].tokens_per_second)
    bounds = jackknife_bounds(
        counted.tokens[best], counted.steps[best], counted.tokens, counted.steps,
        confidence=CONFIDENCE,
    )  # fmt: skip
    seconds = np.array([point.seconds for point in points])
    may = np.exp(bounds.upper) * seconds[best] / seconds >= 1
    may[best] = True
    numbers = {point.num_draft_tokens for point, good in zip(points, may, strict=True) if good}
    return LengthAdvice(
        form=form,
        own=own,
        gpu=machine.gpu.name,
        concurrency=concurrency,
        points=tuple(points),
        best=points[best],
        within=tuple(sorted(numbers)),
    )


def _counted(draft: RecordedDraft, measured: bool) -> _Counted:
    """By distinct prompts; with the number 0 where the target's step of one token is known."""
    places: dict[str, int] = {}
    for prompts in zip(*(length.prompts for length in draft.lengths), strict=True):
        if all(prompt.counts.num_steps for prompt in prompts):
            places.setdefault(prompts[0].counted_with, len(places))
    if len(places) < 2:
        raise CompareError(
            draft.where,
            f"expected two distinct prompts or more with verify steps, got {len(places)}",
            fix="record more prompts, or longer continuations",
        )
    tokens, steps = (np.zeros((len(draft.lengths), len(places))) for _ in range(2))
    for row, length in enumerate(draft.lengths):
        for prompt in length.prompts:
            column = places.get(prompt.counted_with)
            if column is not None:
                tokens[row, column] += prompt.counts.num_emitted_tokens
                steps[row, column] += prompt.counts.num_steps
    if measured:
        return _Counted(lengths=draft.lengths, tokens=tokens, steps=steps)
    return _Counted(
        lengths=(None, *draft.lengths),
        tokens=np.concatenate([steps[:1], tokens]),
        steps=np.concatenate([steps[:1], steps]),
    )
