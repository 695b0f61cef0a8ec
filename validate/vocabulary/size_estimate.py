"""What `estimate` says of a draft at every size of its head: bytes of drafting, time, speed-up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...quantize.drafts import Draft
from ...quantize.estimate.draft_round import draft_round, plain_weights, usual_context
from ...quantize.estimate.work import Machine, Round
from .cut_headers import with_vocabulary
from .size_curve import SizeCurve
from .size_speed import MachineSpeeds, size_speeds
from .step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """Bytes and speed by the number of rows.

    Attributes:
        drafting_bytes: that a verify step's drafting reads, at concurrency 1, by size.
        head_bytes: of them, those of the head.
        context: positions of each sequence that are in its KV cache.
        speeds: with the rows that all texts choose.
        off_domain: with rows chosen without a prompt's own category; empty where there are none.
    """

    drafting_bytes: Mapping[int, int]
    head_bytes: Mapping[int, int]
    context: int
    speeds: tuple[MachineSpeeds, ...]
    off_domain: tuple[MachineSpeeds, ...]


def size_estimate(
    draft: Draft,
    curve: SizeCurve,
    machines: Sequence[Machine],
    target: StepTimes | None,
    concurrencies: Sequence[int],
) -> SizeEstimate:
    """Estimate every size of a curve.

    Args:
        draft: unquantized, by its headers.
        target: whose verify step ends a round; None = not known.
        concurrencies: sequences at once.

    Raises:
        EstimateError: such a draft is not estimated.
    """
    context = usual_context(draft.checkpoint.config)
    k = curve.num_draft_tokens
    drafts = {size: with_vocabulary(draft, size) for size in curve.sizes} | {curve.num_rows: draft}
    rounds = {size: _round(one, k, context) for size, one in drafts.items()}
    return SizeEstimate(
        drafting_bytes={size: one.nbytes(1) for size, one in rounds.items()},
        head_bytes={size: one.nbytes(1, "head") for size, one in rounds.items()},
        context=context,
        speeds=size_speeds(curve, curve.chosen, rounds, machines, target, concurrencies),
        off_domain=()
        if curve.off_domain is None
        else size_speeds(curve, curve.off_domain, rounds, machines, target, concurrencies),
    )


def _round(draft: Draft, num_draft_tokens: int, context: int) -> Round:
    weights = plain_weights(draft)
    return draft_round(draft, weights, num_draft_tokens=num_draft_tokens, context=context, tp=1)
