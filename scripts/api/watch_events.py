"""What a watch tells of each reading, alarm and missed reading, to listener and webhook."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...recipes.errors import DraftQuantError
from .listener import Listener

if TYPE_CHECKING:
    from ...validate.golden.golden import Golden
    from ...validate.monitoring.drift import Detectors, Reading, Standing
    from ...validate.monitoring.webhook import Webhook


@dataclass(slots=True, kw_only=True)
class Seen:
    """Hears of the readings, tells the listener, and remembers what the report says."""

    golden: "Golden"
    listener: Listener
    webhook: "Webhook | None"
    readings: int = 0
    verify_steps: int = 0
    missed_readings: int = 0
    warned: bool = False
    alarms: list[Mapping[str, Any]] = field(default_factory=list)
    categories: "Mapping[str, Standing]" = field(default_factory=dict)
    problem: str = (
        "the only reading says where the counters stand; the next one is compared with it"
    )

    def begin(self, detectors: "Detectors") -> None:
        """Say what is watched, and what is never taken for a fall."""
        for name, limit in detectors.limits.items():
            self.listener.note(
                f"{name or 'all'}: golden {limit.golden:.4f}; alarms below {limit.lowest:.4f}"
                f" ({limit.drop:.2%} lower: the tolerated drop, and golden's own 95% interval)"
            )

    def reading(self, found: "Reading") -> None:
        """See `Watcher`."""
        self.readings += 1
        self.verify_steps += found.verify_steps
        self.categories = found.categories
        for problem in found.problems:
            self.warned = True
            self.listener.warning(problem)
        rows = [_row(name, one) for name, one in found.categories.items()]
        self.listener.event({"event": "reading", "time": _time(found.time), "categories": rows})
        for name, one in found.fallen.items():
            alarm = _alarm(self.golden, name, one, found.time)
            self.alarms.append(alarm)
            self.listener.event(alarm)
            unsent = None if self.webhook is None else self.webhook.send(alarm)
            if unsent is not None:
                self.listener.warning(f"{unsent}; it was of {_time(found.time)}")

    def missed(self, problem: DraftQuantError) -> None:
        """See `Watcher`."""
        self.missed_readings += 1
        self.listener.warning(f"no reading: {problem}")
        self.listener.event(
            {"event": "missed", "time": _time(time.time()), "where": str(problem.where),
             "what": problem.what}
        )  # fmt: skip


def _row(name: str, one: "Standing") -> dict[str, Any]:
    return {
        "category": name,
        "verify_steps": one.verify_steps,
        "acceptance_length": one.acceptance_length,
        "all_verify_steps": one.all_verify_steps,
        "mean_acceptance_length": one.mean_acceptance_length,
        "golden": one.golden,
        "limit": one.limit,
        "evidence": one.evidence,
        "alarm_at": one.alarm_at,
    }


def _alarm(golden: "Golden", name: str, one: "Standing", now: float) -> dict[str, Any]:
    assert one.fall is not None
    mean = one.fall.mean_acceptance_length
    return {
        "event": "alarm",
        "time": _time(now),
        "draft": golden.draft,
        "target": golden.target,
        "category": name,
        "since": _time(max(0.0, now - one.fall.seconds)),
        "verify_steps": round(one.fall.verify_steps),
        "acceptance_length": mean,
        "golden": one.golden,
        "limit": one.limit,
        "change": mean / one.golden - 1,
    }


def _time(seconds: float) -> str:
    """UTC, as 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
