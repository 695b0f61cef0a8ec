"""A canary that runs: reads the counters of two live servers again and again, until a verdict."""

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...calibration.errors import ServerError
from ...recipes.errors import DraftQuantError
from ..errors import MeasureError, WatchError
from ..measure.protocols.counters import Counters
from .canary import Arm, Comparison, Judged, Rule
from .counter_stream import Sources, counted_since, where_they_stand
from .readings import Source
from .watching import Clock, Schedule

_CLOCK = Clock()
_DRAFTED_ALIKE = 0.01
"""Relative difference of drafted tokens per verify step that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The two that are compared."""

    baseline: Source
    candidate: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Where the counters of one server stand.

    Attributes:
        sources: None before the first reading. drafted: tokens in all readings; 0 = not counted.
        positions: K as the counters show it; 0 where they show none.
    """

    sources: Sources | None = None
    drafted: float = 0
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Where a canary stands, and what it goes on from.

    Attributes:
        baseline, candidate: their counters. comparison: of what they counted.
        told: warnings that were given already.
    """

    baseline: Counted = Counted()
    candidate: Counted = Counted()
    comparison: Comparison = field(default_factory=Comparison)
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """What one reading of both servers says.

    Attributes:
        time: seconds since 1970. comparison: so far. judged: its verdict.
        problems: of what was left out or may mislead, a sentence each.
    """

    time: float
    comparison: Comparison
    judged: Judged
    problems: tuple[str, ...] = ()


class Listening(Protocol):
    """Who hears of the readings."""

    def reading(self, found: CanaryReading) -> None:
        """Both counters were read."""

    def missed(self, problem: DraftQuantError) -> None:
        """One server could not be read, and is asked again at the next reading."""


class Kept(Protocol):
    """Where the state is written after every reading."""

    def write(self, canary: Canary) -> None:
        """Write it."""


async def keep_comparing(
    servers: Servers,
    rule: Rule,
    schedule: Schedule,
    listening: Listening,
    *,
    canary: Canary | None = None,
    kept: Kept | None = None,
    clock: Clock = _CLOCK,
) -> None:
    """Read both until there is a verdict, or the schedule ends.

    Args:
        servers: baseline and candidate.
        rule: how they are compared.
        schedule: when; `until_alarm` says nothing here.
        listening: hears of every reading.
        canary: where an earlier run stood; None = this one begins. A verdict that it gave stays.
        kept: where the state is written.
        clock: the time.

    Raises:
        ServerError, MeasureError: the first reading of a server fails; later ones are missed.
        WatchError: the servers draft different numbers of tokens, or more than golden, or are one.
    """
    began, first, canary = clock.now(), True, canary or Canary()
    judged = rule.judge(canary.comparison)
    if judged.verdict != "INCONCLUSIVE":
        listening.reading(
            CanaryReading(time=clock.now(), comparison=canary.comparison, judged=judged)
        )
        return
    while True:
        pages = await asyncio.gather(
            _page(servers.baseline), _page(servers.candidate), return_exceptions=False
        )
        problems: list[str] = []
        for source, page in zip((servers.baseline, servers.candidate), pages, strict=True):
            if isinstance(page, DraftQuantError):
                if first:
                    raise page
                listening.missed(page)
                continue
            canary = _after(canary, source is servers.candidate, source, page, rule, problems)
        _check_two(canary, servers, rule)
        compared = rule.block(canary.comparison)
        warned = _warned(canary)
        canary = dataclasses.replace(
            canary, comparison=compared, told=tuple(dict.fromkeys((*canary.told, *warned)))
        )
        judged = rule.judge(compared)
        listening.reading(
            CanaryReading(
                time=clock.now(), comparison=compared, judged=judged,
                problems=(*problems, *warned),
            )
        )  # fmt: skip
        if kept is not None:
            kept.write(canary)
        first = False
        ended = schedule.seconds is not None and clock.now() - began >= schedule.seconds
        if schedule.once or ended or judged.verdict != "INCONCLUSIVE":
            return
        await clock.wait(schedule.every)


async def _page(source: Source) -> Counters | DraftQuantError:
    """A page of which every counter can be judged, or why there is none."""
    try:
        page = await source.read()
        where_they_stand(page, source.engine, source.where)
        return page
    except (ServerError, MeasureError) as exc:
        return exc


def _after(
    canary: Canary, candidate: bool, source: Source, page: Counters, rule: Rule, problems: list[str]
) -> Canary:
    """With one page of one server."""
    name = "candidate" if candidate else "baseline"
    before, comparison = (canary.candidate if candidate else canary.baseline), canary.comparison
    engine, where = source.engine, source.where
    shown = engine.positions(page)
    if shown > rule.num_draft_tokens:
        raise WatchError(
            where,
            f"drafts K = {shown} tokens per verify step; golden acceptance is of"
            f" K = {rule.num_draft_tokens}",
            fix=f"write golden acceptance with the K that is served, such as replay -k {shown}"
            " --golden",
        )
    positions = max(shown, before.positions)
    if before.sources is None:
        stands = Counted(sources=where_they_stand(page, engine, where), positions=positions)
        first: dict[str, Any] = {name: stands}
        return dataclasses.replace(canary, **first)
    since = counted_since(before.sources, page, engine, where)
    problems += since.fallen
    own = engine.read(since.increments)
    drafted = before.drafted
    if own is not None and own.accepted > own.verify_steps * rule.num_draft_tokens:
        problems.append(
            f"{where}: {own.accepted:,} tokens accepted in {own.verify_steps:,} verify steps of"
            f" K = {rule.num_draft_tokens} cannot be: they are not judged"
        )
    elif own is not None:
        arm: Arm = getattr(comparison, name)
        counted = arm.counted(own.verify_steps, own.accepted)
        arms: dict[str, Any] = {name: counted}
        comparison = dataclasses.replace(comparison, **arms)
        if engine.drafted is not None:
            drafted += engine.drafted.total(since.increments) or 0
    stands = Counted(sources=since.sources, drafted=drafted, positions=positions)
    changed: dict[str, Any] = {name: stands}
    return dataclasses.replace(canary, comparison=comparison, **changed)


def _check_two(canary: Canary, servers: Servers, rule: Rule) -> None:
    """Refuse one server under two addresses, and two that draft different numbers of tokens."""
    fewest = min(canary.comparison.candidate.verify_steps, canary.comparison.baseline.verify_steps)
    if fewest >= rule.fewest_steps and canary.baseline.sources == canary.candidate.sources:
        raise WatchError(
            servers.candidate.where,
            f"has just the counters of {servers.baseline.where}, after {round(fewest):,} verify"
            " steps: it is the same server, or answers copies of its requests with the same draft",
            fix="give the address of a server with another draft as --candidate",
        )
    ours, theirs = canary.candidate.positions, canary.baseline.positions
    if servers.candidate.engine.every_position and ours and theirs and ours != theirs:
        raise WatchError(
            servers.candidate.where,
            f"drafts K = {ours} tokens per verify step, and {servers.baseline.where} K = {theirs}:"
            " their acceptance lengths cannot be compared",
            fix="start both servers with the same number of draft tokens",
        )


def _warned(canary: Canary) -> tuple[str, ...]:
    """That drafted tokens per step differ, once."""
    found = canary.comparison
    steps = found.baseline.verify_steps, found.candidate.verify_steps
    drafted = canary.baseline.drafted, canary.candidate.drafted
    if canary.told or not all(steps) or not all(drafted):
        return ()
    theirs, ours = drafted[0] / steps[0], drafted[1] / steps[1]
    if abs(ours - theirs) <= _DRAFTED_ALIKE * theirs:
        return ()
    return (
        f"the baseline drafts {theirs:.2f} tokens per verify step, the candidate {ours:.2f}: part"
        " of a change of the acceptance length is due to that",
    )
