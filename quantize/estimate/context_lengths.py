"""What drafting reads and how long it takes at one context length after the other, by KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...recipes.formats import FP8_CACHE
from .draft_round import draft_round
from .forms import Form
from .step_estimate import Estimate
from .work import Machine, Round

CONTEXTS = tuple(2**i for i in range(10, 18))
"""1k to 128k positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtContext:
    """One form of a draft at one context length, with its cache in BF16 and in FP8.

    Attributes:
        cache_bytes, fp8_cache_bytes: that drafting for one verify step reads for one sequence.
        other_bytes: that it reads besides at concurrency 1.
        seconds, fp8_seconds: of drafting on the first GPU, at the most sequences asked for.
    """

    form: str
    context: int
    cache_bytes: int
    fp8_cache_bytes: int
    other_bytes: int
    seconds: float
    fp8_seconds: float

    @property
    def cache_share(self) -> float:
        """Of a BF16 cache, of all that is read at concurrency 1."""
        return self.cache_bytes / (self.cache_bytes + self.other_bytes)

    @property
    def saved(self) -> float:
        """Share of the time that an FP8 cache saves."""
        return 1 - self.fp8_seconds / self.seconds


def at_contexts(estimate: Estimate, machine: Machine, concurrency: int) -> Iterator[AtContext]:
    """The draft as it is and the form that reads the least, at each of `CONTEXTS`."""
    plain = [one for one in estimate.candidates if not one.hypothetical]
    least = min(plain, key=lambda one: one.round.nbytes(1))
    for form in {one.name: one.form for one in (estimate.baseline, least)}.values():
        for context in CONTEXTS:
            wide, narrow = (_round(estimate, form, context, fp8=fp8) for fp8 in (False, True))
            yield AtContext(
                form=form.name,
                context=context,
                cache_bytes=wide.nbytes(1, "kv_cache"),
                fp8_cache_bytes=narrow.nbytes(1, "kv_cache"),
                other_bytes=wide.nbytes(1) - wide.nbytes(1, "kv_cache"),
                seconds=machine.round_seconds(wide, concurrency),
                fp8_seconds=machine.round_seconds(narrow, concurrency),
            )


def _round(estimate: Estimate, form: Form, context: int, *, fp8: bool) -> Round:
    return draft_round(
        form.draft,
        form.weights,
        num_draft_tokens=estimate.num_draft_tokens,
        context=context,
        tp=estimate.tp,
        kv_cache=FP8_CACHE if fp8 else None,
    )
