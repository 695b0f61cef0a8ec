"""What each reading says of a live draft: by category, and the alarm where one fell.

Each category has a detector of its own. With C of them, each alarms at C / alpha, so that all
together alarm falsely at most alpha times a day.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...recipes.errors import short
from ..errors import GoldenError, WatchError
from ..golden.golden import ALL, Golden
from ..measure.protocols.counters import Counters
from ..measure.protocols.engine_counters import EngineCounters, ServerSteps
from .bets import Limit, limit_of
from .counter_stream import Sources, counted_since
from .e_detector import Evidence, Fall, after
from .readings import by_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One category, as far as it was watched.

    Attributes:
        evidence: of its detector.
        verify_steps, accepted: in all readings.
    """

    evidence: Evidence
    verify_steps: float = 0
    accepted: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One category after a reading.

    Attributes:
        verify_steps: since the reading before. acceptance_length: in them; None without any.
        all_verify_steps: in all readings. mean_acceptance_length: in them; None without any.
        golden, limit: mean acceptance length that it should have, and must not fall below.
        evidence: how strongly the readings speak for a fall. alarm_at: from which on that is one.
        fall: what was counted since it began, in the reading that alarms.
    """

    verify_steps: int
    acceptance_length: float | None
    all_verify_steps: int
    mean_acceptance_length: float | None
    golden: float
    limit: float
    evidence: float
    alarm_at: float
    fall: Fall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one reading says.

    Attributes:
        time: seconds since 1970.
        categories: by name, "" = all.
        problems: of what was left out, a sentence each.
    """

    time: float
    categories: Mapping[str, Standing]
    problems: tuple[str, ...] = ()

    @property
    def verify_steps(self) -> int:
        """Since the reading before."""
        return sum(one.verify_steps for one in self.categories.values())

    @property
    def fallen(self) -> Mapping[str, Standing]:
        """The categories that alarm."""
        return {name: one for name, one in self.categories.items() if one.fall is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Where a watch stands.

    Attributes:
        read_at: time of the last reading, in seconds since 1970.
        sources: where the counters stood then.
        tallies: by category.
    """

    read_at: float
    sources: Sources
    tallies: Mapping[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectors:
    """What is watched.

    Attributes:
        engine: names and labels of the counters.
        num_draft_tokens: K of golden.
        category_label: label whose values are categories; None = one category.
        limits: by category.
        alpha: false alarms a day, at most, of all categories together.
    """

    engine: EngineCounters
    num_draft_tokens: int
    category_label: str | None
    limits: Mapping[str, Limit]
    alpha: float

    @classmethod
    def of(
        cls,
        golden: Golden,
        engine: EngineCounters,
        *,
        category: str = ALL,
        category_label: str | None = None,
        max_drop: float,
        alpha: float,
    ) -> "Detectors":
        """Against golden acceptance.

        Raises:
            GoldenError: golden has no such category, or does not say how much its requests differ.
        """
        if category not in golden.categories:
            known = ", ".join(filter(None, golden.categories)) or "none"
            raise GoldenError("--category", f"golden has no category {category!r}, but {known}",
                              fix="leave --category out for all prompts")  # fmt: skip
        names = [category]
        if category_label is not None:
            names = [name for name in golden.categories if name != ALL]
            if not names:
                raise GoldenError(
                    "--category-label", "golden has no categories to hold its values against",
                    fix="leave it out, or write golden acceptance of prompts with categories",
                )  # fmt: skip
        return cls(
            engine=engine,
            num_draft_tokens=golden.num_draft_tokens,
            category_label=category_label,
            limits={
                name: limit_of(
                    golden.of_category(name),
                    max_drop,
                    f"golden, category {name!r}" if name else "golden",
                )
                for name in names
            },
            alpha=alpha,
        )

    @property
    def alarm_at(self) -> float:
        """Evidence from which on a category alarms."""
        return len(self.limits) / self.alpha

    def begin(self, sources: Sources, now: float) -> Drift:
        """The first reading: it says where the counters stand."""
        beginnings = {
            name: Tally(evidence=Evidence.beginning(len(limit.bets)))
            for name, limit in self.limits.items()
        }
        return Drift(read_at=now, sources=sources, tallies=beginnings)

    def read(
        self, drift: Drift, page: Counters, now: float, where: str = "the page"
    ) -> tuple[Drift, Reading]:
        """One more reading.

        Args:
            drift: before it.
            page: counters.
            now: seconds since 1970; before the last reading, no time has passed.
            where: the page, for errors.

        Returns:
            Where the watch stands then, and what the reading says.

        Raises:
            MeasureError: a counter is negative or no number.
            WatchError: the server has another K than golden.
        """
        counted = counted_since(drift.sources, page, self.engine, where)
        self.check_positions(page, where)
        problems = [*page.warnings, *counted.fallen]
        steps, seconds = self._steps(counted.increments, problems), max(0.0, now - drift.read_at)
        tallies, standings = {}, {}
        for name, limit in self.limits.items():
            tally, standings[name] = self._judged(
                drift.tallies[name], limit, steps.get(name), seconds
            )
            tallies[name] = tally
        return (
            Drift(read_at=now, sources=counted.sources, tallies=tallies),
            Reading(time=now, categories=standings, problems=tuple(problems)),
        )

    def _judged(
        self, tally: Tally, limit: Limit, own: ServerSteps | None, seconds: float
    ) -> tuple[Tally, Standing]:
        steps, accepted = (own.verify_steps, own.accepted) if own is not None else (0, 0)
        evidence = after(
            tally.evidence, limit, verify_steps=steps, accepted=accepted, seconds=seconds
        )
        alarms = bool(steps) and evidence.log_mean >= math.log(self.alarm_at)
        fall = evidence.fall
        if not fall.verify_steps:  # no single beginning speaks for one, but all of them together
            fall = Fall(seconds=seconds, verify_steps=steps, accepted=accepted)
        tally = Tally(
            evidence=Evidence.beginning(len(limit.bets), again=True) if alarms else evidence,
            verify_steps=tally.verify_steps + steps,
            accepted=tally.accepted + accepted,
        )
        return tally, Standing(
            verify_steps=steps,
            acceptance_length=1 + accepted / steps if steps else None,
            all_verify_steps=round(tally.verify_steps),
            mean_acceptance_length=1 + tally.accepted / tally.verify_steps
            if tally.verify_steps
            else None,
            golden=limit.golden,
            limit=limit.lowest,
            evidence=math.exp(min(evidence.log_mean, 700.0)),
            alarm_at=self.alarm_at,
            fall=fall if alarms else None,
        )

    def _steps(self, increments: Counters, problems: list[str]) -> Mapping[str, ServerSteps]:
        """Verify steps by category; what cannot be is left out and named."""
        found: dict[str, ServerSteps] = {}
        if self.category_label is None:
            pages: Mapping[str, Counters] = {next(iter(self.limits)): increments}
        else:
            pages = by_label(increments, self.engine, self.category_label)
        for name, page in pages.items():
            own = self.engine.read(page)
            if own is None or not own.verify_steps:
                continue
            if name not in self.limits:
                problems.append(
                    f"{self.category_label}={short(name)} is no category of golden: its verify"
                    " steps are not judged"
                )
            elif own.accepted > own.verify_steps * self.num_draft_tokens:
                problems.append(
                    f"{own.accepted:,} tokens accepted in {own.verify_steps:,} verify steps of"
                    f" K = {self.num_draft_tokens} cannot be: this reading is not judged"
                )
            else:
                found[name] = own
        return found

    def check_positions(self, page: Counters, where: str) -> None:
        """Refuse a server that drafts more tokens per step than golden, or is seen to draft less.

        Raises:
            WatchError: it does.
        """
        shown = self.engine.positions(page)
        fewer = self.engine.every_position and 0 < shown < self.num_draft_tokens
        if fewer or shown > self.num_draft_tokens:
            raise WatchError(
                where,
                f"drafts K = {shown} tokens per verify step; golden acceptance is of"
                f" K = {self.num_draft_tokens}",
                fix=f"write golden acceptance with the K that is served, such as replay -k {shown}"
                " --golden",
            )
