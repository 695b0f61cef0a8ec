"""How many tokens to draft, by concurrency: what each number is worth, and engines' schedules.

Speed is acceptance length / (drafting + verify step); which numbers are as good as the best one,
as far as the prompts tell, is found by `validate/draft_length`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPoint:
    """One number of draft tokens at one concurrency; times in seconds.

    Attributes:
        num_draft_tokens: K, verified in a round; 0 = nothing is drafted.
        drafted: proposed in a round: more than K where a block is drafted whole and cut.
        acceptance_length: measured.
    """

    num_draft_tokens: int
    drafted: int
    acceptance_length: float
    drafting_seconds: float
    verify_seconds: float

    @property
    def seconds(self) -> float:
        """Of a round."""
        return self.drafting_seconds + self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of one sequence."""
        return self.acceptance_length / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthAdvice:
    """What one form of the draft should draft on one GPU at one concurrency.

    Attributes:
        form: its name. own: its own acceptance was measured; False = that of the draft as it is.
        points: one for each number of draft tokens, ascending.
        best: the fastest of them.
        within: numbers that may be as fast as the best, within the bounds; the best among them.
    """

    form: str
    own: bool
    gpu: str
    concurrency: int
    points: tuple[LengthPoint, ...]
    best: LengthPoint
    within: tuple[int, ...]

    @property
    def undrafted(self) -> LengthPoint | None:
        """Decoding without a draft; None where the target's step of one token is not known."""
        first = self.points[0]
        return None if first.num_draft_tokens else first


Range = tuple[int, int, int]
"""First and last batch size, and K."""


def schedule(advised: Sequence[LengthAdvice]) -> tuple[Range, ...]:
    """K by batch size: that of a concurrency holds up to the next one that was asked for.

    Args:
        advised: of one form on one GPU, by concurrency, ascending.

    Returns:
        Ranges without a gap, from batch size 1 on; neighbours differ in K.
    """
    longest = max(point.drafted for one in advised for point in one.points)
    sizes = [one.concurrency for one in advised]
    ends = [*(size - 1 for size in sizes[1:]), sizes[-1]]
    chosen = zip([1, *sizes[1:]], ends, (_scheduled(one, longest) for one in advised), strict=True)
    found: list[Range] = []
    for k, same in groupby(chosen, key=lambda one: one[2]):
        several = list(same)
        found.append((several[0][0], several[-1][1], k))
    return tuple(found)


def _scheduled(one: LengthAdvice, longest: int) -> int:
    """A schedule drafts the longest block there is, and cuts it; a chain has no such length."""
    blocks = any(point.drafted > point.num_draft_tokens for point in one.points)
    points = [p for p in one.points if not blocks or p.drafted in (0, longest)]
    return max(points, key=lambda point: point.tokens_per_second).num_draft_tokens


def for_vllm(ranges: Sequence[Range]) -> Mapping[str, Any] | None:
    """Keys of --speculative-config of vLLM 0.33; None where nothing is to be drafted.

    Source: `config/speculative.py:524`, `v1/spec_decode/dynamic/utils.py`: inclusive ranges from 1
    on, and beyond the last one its K goes on.
    """
    most = max(k for _, _, k in ranges)
    if not most:
        return None
    keys: dict[str, Any] = {"num_speculative_tokens": most}
    if len(ranges) > 1:
        keys["num_speculative_tokens_per_batch_size"] = [list(each) for each in ranges]
    return keys


def for_tensorrt_llm(ranges: Sequence[Range]) -> Mapping[str, Any] | None:
    """Keys of speculative_config of TensorRT-LLM; None where it has no word for such a schedule.

    Source: main branch, `llmapi/llm_args.py` (`draft_len_schedule`) and
    `_torch/speculative/utils.py` (`get_draft_len_for_batch_size`), since PR#10860: K up to each
    batch size, the first being max_draft_len and the largest; beyond the last nothing is drafted.
    Up to 1.2 the keys were the sizes from which on a K holds.
    """
    most = max(k for _, _, k in ranges)
    if not most or ranges[0][2] != most:
        return None
    return {"max_draft_len": most, "draft_len_schedule": {str(end): k for _, end, k in ranges}}


def said(advised: Iterable[LengthAdvice]) -> str:
    """Which K at which concurrency, and what else may be as good, in words."""
    several = list(advised)
    parts = []
    for k, same in groupby(several, key=lambda one: one.best.num_draft_tokens):
        places = [one.concurrency for one in same]
        where = f"at {_places(places)}" if len(places) < len(several) else _everywhere(places)
        parts.append(f"{k} {where}")
    doubts = [
        f"{_numbers(within)} at {_places([one.concurrency for one in same])}"
        for within, same in _by_within(several)
        if len(within) > 1
    ]
    bounds = f"; within the bounds {', '.join(doubts)}" if doubts else "; the bounds allow no other"
    if all(len(one.points) == 1 for one in several):
        bounds = "; no other number was measured"
    return ", ".join(parts) + bounds


def _by_within(
    several: Sequence[LengthAdvice],
) -> Iterable[tuple[tuple[int, ...], list[LengthAdvice]]]:
    return ((within, list(same)) for within, same in groupby(several, key=lambda one: one.within))


def _everywhere(places: Sequence[int]) -> str:
    return "at all concurrencies" if len(places) > 1 else f"at concurrency {places[0]}"


def _places(places: Sequence[int]) -> str:
    return f"{places[0]} to {places[-1]}" if len(places) > 1 else str(places[0])


def _numbers(within: Sequence[int]) -> str:
    whole = list(within) == list(range(within[0], within[-1] + 1))
    return f"{within[0]} to {within[-1]}" if whole else ", ".join(map(str, within))
