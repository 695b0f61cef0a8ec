"""The verify steps of one prompt on two servers: which of them lie in text that both wrote.

Two servers' greedy outputs part at near ties of the target. Common text judges only the drafts,
while other text adds its own ease as noise; but outputs part sooner where text is hard, so the
common steps alone are those of easy text (docs/servers.md).

So each prompt keeps its whole length. Of n positions at which a step can begin, c lie in common
text. What the other r = n - c have lost can be estimated in two ways: by their own steps, with a
variance of r * v, or by those in common text, taken r / c times, with r^2 / c * p * v, where p is
the share of the variance that two drafts on the same text do not share. The best mean of the two
takes

    a = c / (c + p r) of the second:  a common step weighs 1 + r / (c + p r), any other 1 - a.

The weights depend only on lengths of texts, never on what was accepted. Steps of a prompt in one
context bin are weighted like those of a separate prompt.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..counting.acceptance_counts import CONTEXT_BINS, AcceptanceCounts, ContextCounts
from ..measure.measurement import RequestRecord

PAIRED_NOISE = 0.15
"""p: two formats of a draft decode 85 % of the verify steps alike (`simulated_replays`). It affects
the width of the bounds, not their place: 0.4 makes them 4 % wider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The verify steps of one record; common: all K drafted positions lie in common text."""

    common: AcceptanceCounts
    rest: AcceptanceCounts

    @property
    def whole(self) -> AcceptanceCounts:
        """Every verify step."""
        return self.common + self.rest

    def weighted(self, common: float, rest: float) -> AcceptanceCounts:
        """The counts with these weights."""
        both = zip(self.common.histogram, self.rest.histogram, strict=True)
        return AcceptanceCounts(histogram=tuple(common * c + rest * r for c, r in both))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedOutputs:
    """One prompt on both servers; both wrote `num_common` tokens before they parted.

    Attributes:
        placed: both report where each verify step began, and the text is greedy.
        contexts: of both, by context bin, each step with its weight; None where one does not report
            where its steps began.
    """

    num_common: int
    num_tokens: tuple[int, int]
    placed: bool
    baseline: StepSplit
    candidate: StepSplit
    contexts: tuple[ContextCounts, ContextCounts] | None = None

    @property
    def identical(self) -> bool:
        """True if both wrote the same."""
        return self.num_tokens == (self.num_common, self.num_common)

    def weighted(self) -> tuple[AcceptanceCounts, AcceptanceCounts]:
        """Counts of the baseline and of the candidate, each step with the weight of its place."""
        if not self.placed:
            return self.baseline.whole, self.candidate.whole
        num_draft_tokens = self.baseline.whole.num_draft_tokens
        common, places = _places(self.num_common, self.num_tokens, num_draft_tokens)
        weights = _weights(common, places - common)
        return self.baseline.weighted(*weights), self.candidate.weighted(*weights)


def _places(
    num_common: int, num_tokens: tuple[int, int], num_draft_tokens: int
) -> tuple[int, float]:
    """Where a step with a known outcome can begin: in common text, and in all."""
    return max(0, num_common - num_draft_tokens), max(0.0, sum(num_tokens) / 2 - num_draft_tokens)


def _weights(common: float, rest: float) -> tuple[float, float]:
    """The weight of a step in common text, and of any other."""
    if not common + rest:  # too short for a step with a known outcome
        return 1.0, 0.0
    divisor = common + PAIRED_NOISE * rest
    return 1 + rest / divisor, 1 - common / divisor


def pair_outputs(
    baseline: RequestRecord,
    candidate: RequestRecord,
    num_draft_tokens: int,
    *,
    greedy: bool,
) -> PairedOutputs:
    """Split the verify steps of one prompt at the token at which two outputs part.

    With drawn tokens (not `greedy`), that depends on what was accepted: no step is common.
    """
    common = common_length(baseline.token_ids, candidate.token_ids)
    both = [_Placed.of(record, num_draft_tokens) for record in (baseline, candidate)]
    placed = greedy and None not in both
    nothing = AcceptanceCounts(histogram=(0,) * (num_draft_tokens + 1))
    splits = [
        steps.split(common, num_draft_tokens)
        if placed and steps is not None
        else StepSplit(common=nothing, rest=whole_counts(record, num_draft_tokens))
        for steps, record in zip(both, (baseline, candidate), strict=True)
    ]
    outputs = PairedOutputs(
        num_common=common,
        num_tokens=(len(baseline.token_ids), len(candidate.token_ids)),
        placed=placed,
        baseline=splits[0],
        candidate=splits[1],
    )
    if both[0] is None or both[1] is None:
        return outputs
    first = baseline.num_prompt_tokens
    return replace(outputs, contexts=_contexts(outputs, (both[0], both[1]), first))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Verify steps in order; starts: tokens of the output before each."""

    starts: Sequence[int]
    accepted: Sequence[int]

    @classmethod
    def of(cls, record: RequestRecord, num_draft_tokens: int) -> "_Placed | None":
        """None where the record does not report their places."""
        starts = step_starts(record, num_draft_tokens)
        if starts is None or record.accepted is None:
            return None
        return cls(starts=starts, accepted=record.accepted)

    def between(self, first: int, last: int) -> "_Placed":
        part = slice(bisect_left(self.starts, first), bisect_left(self.starts, last))
        return _Placed(starts=self.starts[part], accepted=self.accepted[part])

    def split(self, common: int, num_draft_tokens: int) -> StepSplit:
        """Split at the end of common text."""
        inside = sum(start + num_draft_tokens <= common for start in self.starts)  # they ascend
        return StepSplit(
            common=AcceptanceCounts.of(self.accepted[:inside], num_draft_tokens),
            rest=AcceptanceCounts.of(self.accepted[inside:], num_draft_tokens),
        )


def _contexts(
    outputs: PairedOutputs, both: tuple[_Placed, _Placed], num_prompt_tokens: int
) -> tuple[ContextCounts, ContextCounts]:
    """The steps of both by context bin; those in one bin are weighted like those of one prompt."""
    depth = outputs.baseline.whole.num_draft_tokens
    common, places = _places(outputs.num_common, outputs.num_tokens, depth)
    most = max(outputs.num_tokens)
    weighted: list[tuple[AcceptanceCounts, AcceptanceCounts]] = []
    behind = num_prompt_tokens + 1  # the first step follows one token
    for span in CONTEXT_BINS.slices(behind, most):
        common_here = max(0, min(common, span.stop) - span.start)
        weights = _weights(common_here, max(0.0, min(places, span.stop) - span.start) - common_here)
        splits = [
            steps.between(span.start + 1, span.stop + 1).split(outputs.num_common, depth)
            for steps in both
        ]
        if not outputs.placed:
            weights = 1.0, 1.0
        weighted.append((splits[0].weighted(*weights), splits[1].weighted(*weights)))
    sides = zip(*weighted, strict=True)
    first, second = (ContextCounts(bins=CONTEXT_BINS, counts=side) for side in sides)
    return first, second


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens until two texts part; all of the shorter one if they do not."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def step_starts(record: RequestRecord, num_draft_tokens: int) -> list[int] | None:
    """Tokens of the output before each verify step, prefill's first.

    None: the engine does not tell the steps, or they do not add up to the output.
    """
    if not record.accepted:
        return None
    *starts, end = accumulate((accepted + 1 for accepted in record.accepted), initial=1)
    cut = num_draft_tokens if record.num_cut_rounds else 0  # tokens, at most
    return starts if starts[-1] < len(record.token_ids) <= end + cut else None


def num_unwritten(record: RequestRecord, num_draft_tokens: int) -> int:
    """Tokens of the output that no verify step wrote, one for each step without a draft.

    At the end up to K may come without a draft, and up to K from verify steps that the engine does
    not tell whole: so much is 0. Below 0 the steps wrote more than K, and a token, beyond the end.
    """
    counts = whole_counts(record, num_draft_tokens)
    return num_missing(len(record.token_ids), counts, cut=record.num_cut_rounds > 0)


def num_missing(num_tokens: int, counts: AcceptanceCounts, *, cut: bool) -> int:
    """The same for an output of `num_tokens`; `cut`: its last verify steps are not counted."""
    missing = num_tokens - 1 - round(counts.num_emitted_tokens)
    most = counts.num_draft_tokens * (2 if cut else 1)
    return 0 if -counts.num_draft_tokens - 1 <= missing <= most else missing


def whole_counts(record: RequestRecord, num_draft_tokens: int) -> AcceptanceCounts:
    """Counts of all steps; without speculation every token after the first is its own step."""
    if record.counts is not None:
        return record.counts
    steps = max(0, len(record.token_ids) - 1)
    return AcceptanceCounts(histogram=(steps, *(0,) * num_draft_tokens))
