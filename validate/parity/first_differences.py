"""Where one run's outputs part from those of another, prompt by prompt, and by how near a tie.

Two texts that differ in a token are two texts: each prompt is looked at up to its first difference.
"""

from dataclasses import dataclass

from ..errors import ParityError
from ..measure.measurement import Measurement, RequestRecord, differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference of one prompt's two outputs.

    Attributes:
        position: 0-based in the output.
        plain_token, other_token: there; None where that output has ended.
        gap: of the plain run's two most likely tokens there, in nats; None = not known.
        drop: by which the other token is less likely to its own server than the plain one was to
            the plain server, in nats; None = not known.
        explained: the gap is within the noise that is allowed, and the other token is as likely.
    """

    id: str
    category: str
    position: int
    plain_token: int | None
    other_token: int | None
    gap: float | None
    drop: float | None
    explained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One run held against the plain one.

    Attributes:
        num_prompts: compared; num_distinct_prompts: by their token ids.
        num_tokens: compared, up to and with the first difference of each prompt.
        max_gap: up to which a difference is noise, in nats.
    """

    name: str
    num_prompts: int
    num_distinct_prompts: int
    num_tokens: int
    max_gap: float
    divergences: tuple[Divergence, ...]

    @property
    def unexplained(self) -> tuple[Divergence, ...]:
        """Beyond noise."""
        return tuple(one for one in self.divergences if not one.explained)

    @property
    def identity_rate(self) -> float:
        """Share of prompts with equal outputs, in [0, 1]."""
        return 1 - len(self.divergences) / self.num_prompts

    @property
    def hazard(self) -> float:
        """Divergences per token that was still equal before."""
        return len(self.divergences) / max(1, self.num_tokens)

    @property
    def largest_gap(self) -> float:
        """Of the differences that a gap is known of; 0 without any."""
        return max((one.gap for one in self.divergences if one.gap is not None), default=0.0)


def audit(plain: Measurement, other: Measurement, *, max_gap: float) -> Audit:
    """Compare every prompt's output with the plain one.

    Args:
        plain: greedy, without speculation, with `top_gap`.
        other: of the same prompts, target and engine.
        max_gap: nats, 0 or more.

    Raises:
        ParityError: the two were not asked the same, or outputs were not chosen greedily.
    """
    _check_comparable(plain, other)
    theirs = {record.id: record for record in other.records}
    found, tokens = [], 0
    for own in plain.records:
        divergence = _first_difference(own, theirs[own.id], max_gap)
        tokens += len(own.token_ids) if divergence is None else divergence.position + 1
        found += [] if divergence is None else [divergence]
    return Audit(
        name=other.name,
        num_prompts=len(plain.records),
        num_distinct_prompts=len({record.prompt_sha256 for record in plain.records}),
        num_tokens=tokens,
        max_gap=max_gap,
        divergences=tuple(found),
    )


def _first_difference(
    plain: RequestRecord, other: RequestRecord, max_gap: float
) -> Divergence | None:
    ours, theirs = plain.token_ids, other.token_ids
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position == len(ours) == len(theirs) and plain.ended == other.ended:
        return None
    gap = plain.top_gap[position] if plain.top_gap and position < len(ours) else None
    drop = _drop(plain, other, position)
    # Noise may put the end of the text elsewhere, but it cuts nothing off.
    cut_off = position == len(theirs) and other.ended == "length"
    near_tie = gap is not None and gap <= max_gap
    # Both servers' noise moves it, and the gap itself lies between the two tokens.
    as_likely = drop is None or abs(drop) <= 2 * max_gap
    return Divergence(
        id=plain.id,
        category=plain.category,
        position=position,
        plain_token=ours[position] if position < len(ours) else None,
        other_token=theirs[position] if position < len(theirs) else None,
        gap=gap,
        drop=drop,
        explained=near_tie and as_likely and not cut_off,
    )


def _drop(plain: RequestRecord, other: RequestRecord, position: int) -> float | None:
    """A near tie explains the second most likely token, no third one."""
    ours, theirs = plain.token_logprob or (), other.token_logprob or ()
    if position >= min(len(ours), len(theirs)):
        return None
    return ours[position] - theirs[position]


def _check_comparable(plain: Measurement, other: Measurement) -> None:
    where = f"{plain.name}, {other.name}"
    found = differences(plain.setup, other.setup)
    if found:
        raise ParityError(where, f"were measured with different settings: {'; '.join(found)}",
                          fix="measure the same prompts, target, engine and lengths")  # fmt: skip
    if plain.setup.asked.temperature != 0:
        raise ParityError(
            where,
            f"outputs were drawn at temperature {plain.setup.asked.temperature:g}: drawn text"
            " differs from run to run",
            fix="measure at temperature 0, or use 'parity sampled'",
        )
    keys = [{(r.id, r.prompt_sha256) for r in one.records} for one in (plain, other)]
    if keys[0] != keys[1] or not keys[0]:
        lacking = len(keys[0] ^ keys[1])
        raise ParityError(where, f"{lacking or 'all'} prompt(s) are not in both",
                          fix="run the interrupted measurement again to its end")  # fmt: skip
    if any(r.top_gap is None or len(r.top_gap) != len(r.token_ids) for r in plain.records):
        raise ParityError(plain.name, "does not say how far apart the two most likely tokens are",
                          fix="measure the plain server with --top-logprobs 2")  # fmt: skip
