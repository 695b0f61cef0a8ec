"""Simulated measurements of two drafts whose outputs part, for `bench_measured`.

A token has an ease, an AR(1) walk along the text around that of its prompt. The baseline accepts
the token at depth j of a round if its ease and a noise of that place are above a threshold that
rises with the depth; the candidate's sum differs by a little noise and by a loss, which may be
larger on hard prompts. Up to the token at which the outputs part both drafts meet the same text
and noise, behind it each its own. Outputs part with a hazard per token that may be larger where
text is hard.

The figures are about those of the shipped EAGLE-3 pair in INT4, K = 3, 128 tokens: acceptance
length 2.9, and 0.04 for the standard deviation of the per-prompt change where nothing parts.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...validate.measure.measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
)
from ...validate.measure.measurement_checks import prompts_sha256

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_DRAFT_TOKENS = 3
NUM_TOKENS = 128
_THRESHOLD, _PER_DEPTH = -0.85, 0.05
_EASE_OF_PROMPTS, _EASE_OF_TOKENS, _PLACE = 0.22, 0.45, 0.8  # standard deviations
_STICKINESS = 0.8  # of the walk
_QUANTIZATION = 0.12  # standard deviation of what quantization adds
_SOME_LOSS = 0.03  # changes the acceptance length by about -1.5 %
_POPULATION = 12_000  # prompts on which the true change is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """How outputs part.

    Attributes:
        hazard: probability per token, at medium ease.
        with_ease: its logarithm falls so fast with the ease of text, in standard deviations.
        loss_with_ease: so does the logarithm of the loss.
    """

    hazard: float
    with_ease: float = 0.0
    loss_with_ease: float = 0.0


def measure(
    generator: np.random.Generator, num_prompts: int, change: float, parting: Parting
) -> tuple[Measurement, Measurement]:
    """Two runs over distinct prompts of a population in which the candidate changed by `change`.

    Args:
        generator: of all random numbers.
        num_prompts: N.
        change: relative change of the acceptance length, pooled over whole texts.
        parting: of the two runs' outputs.
    """
    loss = true_loss(change, parting.loss_with_ease)
    drawn = _draw(generator, num_prompts, loss, parting)
    return (
        _measurement("baseline", drawn.baseline, np.full(num_prompts, NUM_TOKENS)),
        _measurement("candidate", drawn.candidate, drawn.common),
    )


def true_loss(change: float, loss_with_ease: float) -> float:
    """The mean loss of ease with which the population changes by `change`, by a straight line."""
    none, some = (_population_change(loss, loss_with_ease) for loss in (0.0, _SOME_LOSS))
    return _SOME_LOSS * (change - none) / (some - none)


@functools.cache
def _population_change(loss: float, loss_with_ease: float) -> float:
    """Relative, over whole texts that both drafts meet."""
    same_text = Parting(hazard=0.0, loss_with_ease=loss_with_ease)
    drawn = _draw(np.random.default_rng(0), _POPULATION, loss, same_text)
    return _mean_length(drawn.candidate) / _mean_length(drawn.baseline) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """[N, T] tokens that a round at each place accepts; [N] tokens until the outputs part."""

    baseline: Ints
    candidate: Ints
    common: Ints


def _draw(generator: np.random.Generator, count: int, loss: float, parting: Parting) -> _Drawn:
    prompts = _EASE_OF_PROMPTS * generator.standard_normal(count)
    steps = generator.standard_normal((2, count, NUM_TOKENS + NUM_DRAFT_TOKENS))
    ease = _walk(steps[0], steps[0], np.full(count, steps.shape[2]))
    hard = -(prompts[:, None] / _EASE_OF_PROMPTS + np.roll(ease, 1, axis=1)[:, :NUM_TOKENS])
    parts = generator.random((count, NUM_TOKENS)) < parting.hazard * np.exp(
        parting.with_ease * hard
    )
    parts[:, 0] = False  # what the ease before it would be is not drawn
    common = np.where(parts.any(axis=1), parts.argmax(axis=1), NUM_TOKENS)
    other_ease = _walk(steps[0], steps[1], common)
    weight = np.exp(-parting.loss_with_ease * prompts / _EASE_OF_PROMPTS)
    lost = loss * weight / math.exp(parting.loss_with_ease**2 / 2)
    shape = (count, NUM_TOKENS, NUM_DRAFT_TOKENS)
    own, other = (_PLACE * generator.standard_normal(shape) for _ in range(2))
    drafted = np.arange(NUM_TOKENS)[:, None] + np.arange(NUM_DRAFT_TOKENS)
    shared = drafted < common[:, None, None]
    baseline = _sums(prompts, ease) + own
    candidate = _sums(prompts, other_ease) + np.where(shared, own, other)
    candidate += _QUANTIZATION * generator.standard_normal(shape) - lost[:, None, None]
    return _Drawn(
        baseline=_accepted(baseline > 0), candidate=_accepted(candidate > 0), common=common
    )


def _walk(first: Floats, then: Floats, common: Ints) -> Floats:
    """[N, T + K] the ease of tokens, by one's steps and from token `common` on by the other's."""
    ease = np.empty_like(first)
    ease[:, 0] = first[:, 0]
    for token in range(1, ease.shape[1]):
        step = np.where(token < common, first[:, token], then[:, token])
        ease[:, token] = _STICKINESS * ease[:, token - 1] + math.sqrt(1 - _STICKINESS**2) * step
    return ease


def _sums(prompts: Floats, ease: Floats) -> Floats:
    """[N, T, K] how easily the tokens of a round at each place are hit, without its own noise."""
    depths = np.arange(NUM_DRAFT_TOKENS)
    along = np.stack([ease[:, depth : depth + NUM_TOKENS] for depth in depths], axis=2)
    level = prompts[:, None, None] - _THRESHOLD - _PER_DEPTH * depths
    return np.asarray(level + _EASE_OF_TOKENS * along)


def _accepted(hits: Bools) -> Ints:
    return np.asarray(hits.cumprod(axis=2).sum(axis=2), dtype=np.int64)


def _rounds(accepted: Ints) -> Bools:
    """[N, T] whether a round begins behind so many tokens; the first is the prompt's."""
    count, tokens = accepted.shape
    begins = np.zeros((count, tokens + NUM_DRAFT_TOKENS + 2), dtype=bool)
    begins[:, 1] = True
    for place in range(1, tokens):
        here = np.flatnonzero(begins[:, place])
        begins[here, place + 1 + accepted[here, place]] = True
    return begins[:, :tokens]


def _mean_length(accepted: Ints) -> float:
    """Over the rounds whose tokens all lie in the text: their outcome is known."""
    inside = _rounds(accepted)[:, : NUM_TOKENS - NUM_DRAFT_TOKENS + 1]
    return float(1 + accepted[:, : inside.shape[1]][inside].mean())


def _measurement(name: str, accepted: Ints, common: Ints) -> Measurement:
    """As `draftquant measure` writes it; from token `common` on the text is this run's own."""
    begins = _rounds(accepted)
    shared = list(range(NUM_TOKENS))
    records = []
    for number, (rounds, places, until) in enumerate(
        zip(accepted, begins, common.tolist(), strict=True)
    ):
        found = rounds[places].tolist()
        records.append(
            RequestRecord(
                id=str(number),
                category="all",
                prompt_sha256=f"{number:064x}",
                num_prompt_tokens=1,
                token_ids=(*shared[:until], *(NUM_TOKENS + token for token in shared[until:])),
                ended="length",
                histogram=tuple(found.count(j) for j in range(NUM_DRAFT_TOKENS + 1)),
                accepted=tuple(found),
                began=0.0,
                time_to_first_token=None,
                latency=1.0 if name == "baseline" else 2.0,
            )
        )
    digest = prompts_sha256((one.id, one.category, one.prompt_sha256) for one in records)
    asked = Asked(prompts_sha256=digest, max_new_tokens=NUM_TOKENS, ignore_eos=True, concurrency=1)
    return Measurement(
        name=name,
        setup=Setup(
            server=ServerIdentity(engine="vllm", version="simulated", model="simulated"),
            speculation=Speculation(num_draft_tokens=NUM_DRAFT_TOKENS, draft_sha256=None),
            asked=asked,
            draftquant="simulated",
        ),
        records=tuple(records),
    )
