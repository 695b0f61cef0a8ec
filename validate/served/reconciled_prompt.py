"""A replay held against a server, prompt by prompt: what differs, and why.

A round with n tokens of the output behind it drafts tokens n to n + K - 1. Replay says of every n
what would be accepted, so that each round of the server is compared at its own n, whatever went
before, as far as the server wrote the recorded text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...calibration.traces.prompt_trace import PromptTrace
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.rounds import rounds
from ..measure.measurement import RequestRecord
from .common_rounds import common_length, round_starts, whole_counts
from .every_position import EveryPosition

DifferenceKind = Literal["prompt", "text", "K", "kernel", "draft", "round", "untold"]
"""What a difference comes from: another prompt or template; another text behind a token; rounds
with fewer proposals; a near tie of the draft's logits; another draft; nothing that is known; or the
engine does not tell its rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRound:
    """One round of a server at a place that replay can judge.

    Attributes:
        start: tokens of the output behind it. served, replayed: accepted draft tokens.
        num_proposed: draft tokens of the server's round, at most K.
        distance: of the draft's logits at the token at which the two part, see `EveryPosition`;
            None where they do not.
    """

    start: int
    served: int
    replayed: int
    num_proposed: int
    distance: float | None

    @property
    def as_proposed(self) -> bool:
        """The server accepted what replay says of as many proposals as it had."""
        return self.served == min(self.replayed, self.num_proposed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which what was served is not what was replayed.

    Attributes:
        position: 0-based token of the output at which it shows; None = of the whole prompt.
        what: a sentence without a full stop.
        explained: None = it is not known whether that is all.
    """

    kind: DifferenceKind
    position: int | None
    what: str
    explained: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciledPrompt:
    """One prompt, served and replayed.

    Attributes:
        num_common: tokens of the output until it parts from the recorded text. num_tokens: of it.
        served, replayed: all rounds of each, each along its own text and path.
        num_equal: rounds of the server that replay can judge, in which both accept the same.
        served_there, replayed_there: what both say of all these rounds, each at its place.
        num_beyond: rounds of the server that replay does not count: they reach behind the common
            text, or behind its end.
    """

    id: str
    category: str
    num_tokens: int
    num_common: int
    served: AcceptanceCounts
    replayed: AcceptanceCounts
    num_equal: int
    served_there: AcceptanceCounts
    replayed_there: AcceptanceCounts
    num_beyond: int
    differences: tuple[Difference, ...]

    @property
    def num_compared(self) -> int:
        """Rounds of the server that replay can judge."""
        return int(self.served_there.num_steps)

    @property
    def outcome(self) -> Literal["equal", "explained", "not known", "unexplained"]:
        """The worst of its differences."""
        said = {one.explained for one in self.differences}
        if False in said:
            return "unexplained"
        if None in said:
            return "not known"
        return "explained" if said else "equal"


def compare_rounds(
    accepted: Sequence[int],
    starts: Sequence[int],
    common: int,
    here: EveryPosition,
    num_draft_tokens: int,
    drafted: Sequence[int] | None = None,
) -> list[ComparedRound]:
    """Hold the rounds of one output against replay's, each at its own place.

    Args:
        accepted: draft tokens of every round of the server, in order.
        starts: tokens of the output behind each.
        common: tokens until the output parts from the recorded text.
        here: replay of a round behind each token of the recorded text: entry i has i + 1 of them
            behind it, the first of which comes from reading the prompt.
        num_draft_tokens: K.
        drafted: proposed in every round; None = K.

    Returns:
        The rounds whose K tokens all lie in common text.
    """
    found = []
    for number, (served, start) in enumerate(zip(accepted, starts, strict=True)):
        if start + num_draft_tokens > common:
            break
        replayed, distance = here.accepted[start - 1], None
        if served != replayed:  # they parted at the first token that one of the two missed
            distance = here.distances[start - 1][min(served, replayed)]
        proposed = num_draft_tokens if drafted is None else drafted[number]
        found.append(
            ComparedRound(
                start=start,
                served=served,
                replayed=replayed,
                num_proposed=proposed,
                distance=distance,
            )
        )
    return found


def reconcile_prompt(
    record: RequestRecord,
    trace: PromptTrace,
    here: EveryPosition,
    num_draft_tokens: int,
    *,
    near: float,
    gap: float | None,
    max_gap: float,
    other_draft: bool = False,
) -> ReconciledPrompt:
    """Hold what a server did with a prompt against its replay.

    Args:
        record: of the server, which drafted.
        trace: of a prompt with the same id; its token ids may be others.
        here: replay at every place of the trace.
        num_draft_tokens: K of both.
        near: distance of the draft's logits up to which either of two tokens may come out on top.
        gap: of the target's choice where the two texts part, in nats; None = not known.
        max_gap: up to which that is a near tie.
        other_draft: the server had another draft than the one that was replayed.
    """
    if trace.prompt_sha256 != record.prompt_sha256:
        return _of_another_prompt(record, num_draft_tokens)
    common = common_length(record.token_ids, trace.continuation)
    starts = round_starts(record, num_draft_tokens)
    shared = here.accepted[: max(0, common - num_draft_tokens)]
    replayed = rounds(shared)
    compared: list[ComparedRound] = []
    differences = _parting(record, trace, common, gap, max_gap)
    if starts is None or record.accepted is None:
        differences += _by_histogram(record, replayed, parted=bool(differences))
    else:
        compared = compare_rounds(
            record.accepted, starts, common, here, num_draft_tokens, record.drafted
        )
        differences += [
            _explained(one, near, other_draft=other_draft)
            for one in compared
            if one.served != one.replayed
        ]
    served = whole_counts(record, num_draft_tokens)
    return ReconciledPrompt(
        id=record.id,
        category=record.category,
        num_tokens=len(record.token_ids),
        num_common=common,
        served=served,
        replayed=AcceptanceCounts.of(rounds(here.accepted), num_draft_tokens),
        num_equal=sum(one.served == one.replayed for one in compared),
        served_there=AcceptanceCounts.of([one.served for one in compared], num_draft_tokens),
        replayed_there=AcceptanceCounts.of([one.replayed for one in compared], num_draft_tokens),
        num_beyond=int(served.num_steps) - len(compared),
        differences=tuple(differences),
    )


def _of_another_prompt(record: RequestRecord, num_draft_tokens: int) -> ReconciledPrompt:
    none = AcceptanceCounts.of([], num_draft_tokens)
    return ReconciledPrompt(
        id=record.id,
        category=record.category,
        num_tokens=len(record.token_ids),
        num_common=0,
        served=whole_counts(record, num_draft_tokens),
        replayed=none,
        num_equal=0,
        served_there=none,
        replayed_there=none,
        num_beyond=int(whole_counts(record, num_draft_tokens).num_steps),
        differences=(
            Difference(
                kind="prompt",
                position=None,
                what="the served prompt has other token ids than the recorded one: another chat"
                " template, or another prompt of the same name",
                explained=True,
            ),
        ),
    )


def _parting(
    record: RequestRecord, trace: PromptTrace, common: int, gap: float | None, max_gap: float
) -> list[Difference]:
    """Whether the server wrote another token than was recorded, and how near a tie that was."""
    if common == min(len(record.token_ids), len(trace.continuation)):
        return []  # one of the two was asked for fewer tokens
    tokens = (
        f"token {common} is {record.token_ids[common]}, recorded is {trace.continuation[common]}"
    )
    if gap is None:
        said = "the record does not show how near a tie that was"
        return [Difference(kind="text", position=common, what=f"{tokens}; {said}", explained=None)]
    near = "which is a near tie of" if gap <= max_gap else "which is not a near tie of"
    return [
        Difference(
            kind="text",
            position=common,
            what=f"{tokens}: {near} the target, {gap:.3f} nats apart",
            explained=gap <= max_gap,
        )
    ]


def _explained(one: ComparedRound, near: float, *, other_draft: bool) -> Difference:
    counted = (
        f"a verify step accepted {one.served} draft tokens on the server, {one.replayed} in replay"
    )
    if one.as_proposed:
        kind: DifferenceKind = "K"
        why, explained = f"the server proposed {one.num_proposed} in it", True
    elif other_draft:
        kind, why, explained = "draft", "the server had another draft", True
    else:
        assert one.distance is not None  # the two differ
        tie = abs(one.distance) <= near
        kind, explained = ("kernel", True) if tie else ("round", False)
        where = "within" if tie else "beyond"
        why = (
            f"the draft's logits are {abs(one.distance):.3f} apart there, {where} the"
            f" {near:.3f} by which BF16 moves them"
        )
    return Difference(kind=kind, position=one.start, what=f"{counted}: {why}", explained=explained)


def _by_histogram(
    record: RequestRecord, replayed: Sequence[int], *, parted: bool
) -> list[Difference]:
    """Of an engine that tells no rounds: the same text has replay's rounds, and those at its end.

    Every round emits a token and replay leaves out those that begin in the last K tokens.
    """
    histogram = record.histogram or ()
    num_draft_tokens = len(histogram) - 1
    own = AcceptanceCounts.of(replayed, num_draft_tokens).histogram
    beyond = [served - ours for served, ours in zip(histogram, own, strict=True)]
    if not parted and min(beyond) >= 0 and sum(beyond) <= num_draft_tokens:
        return []
    what = "the engine does not report its verify steps, so that they cannot be compared one by one"
    return [Difference(kind="untold", position=None, what=what, explained=None)]
