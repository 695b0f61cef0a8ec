"""Figures of a measurement, of all its requests and by category."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..counting.acceptance_counts import pooled
from .measurement import Measurement, RequestRecord

ALL = "all requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of some requests.

    Attributes:
        category: `ALL` for all of them.
        num_output_tokens: of all outputs.
        num_rounds, acceptance_length: 1 + accepted / rounds, pooled; None without speculation, the
            second also without a round.
        time_to_first_token, time_per_output_token: medians over the requests, in seconds; None
            where answers came whole, or none has a second token.
        num_repeated: requests that were answered at a later attempt than the first.
    """

    category: str
    num_requests: int
    num_output_tokens: int
    num_rounds: float | None
    acceptance_length: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    num_repeated: int


def all_figures(measurement: Measurement) -> tuple[Figures, ...]:
    """Of each category in the order in which they appear, and of all requests last."""
    speculation = measurement.setup.speculation
    most = None if speculation is None else speculation.num_draft_tokens
    records = measurement.records
    categories = dict.fromkeys(record.category for record in records)
    own = ([r for r in records if r.category == category] for category in categories)
    some = zip(categories, own, strict=True) if len(categories) > 1 else ()
    return (*(_figures(name, found, most) for name, found in some), _figures(ALL, records, most))


def tokens_per_second(measurement: Measurement) -> float | None:
    """Output tokens of all requests over the time from the first request to the last answer.

    Returns:
        None where that took no time.
    """
    records = measurement.records
    seconds = max(r.began + r.latency for r in records) - min(r.began for r in records)
    return sum(len(r.token_ids) for r in records) / seconds if seconds else None


def _figures(
    category: str, records: Sequence[RequestRecord], num_draft_tokens: int | None
) -> Figures:
    counts = None
    if num_draft_tokens is not None:
        found = (record.counts for record in records)
        counts = pooled((one for one in found if one is not None), num_draft_tokens)
    return Figures(
        category=category,
        num_requests=len(records),
        num_output_tokens=sum(len(record.token_ids) for record in records),
        num_rounds=None if counts is None else counts.num_steps,
        acceptance_length=counts.mean_acceptance_length if counts and counts.num_steps else None,
        time_to_first_token=_median(record.time_to_first_token for record in records),
        time_per_output_token=_median(record.time_per_output_token for record in records),
        num_repeated=sum(record.num_attempts > 1 for record in records),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
