"""`draftquant watch`: has the acceptance of a live draft fallen?"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ..api.watch import Outcome, watch
from ..console import OnTerminal, print_json_line, stdout

VERB = watch
EPILOG = (
    "exit codes: 0 no alarm, 1 alarm, 2 bad input, 3 the server does not answer, or counted no"
    " verify step"
)
EXIT_CODES: Mapping[Outcome, int] = {"NO ALARM": 0, "ALARM": 1, "NOT ENOUGH": 3}


def run(options: argparse.Namespace) -> int:
    """Print every reading and alarm as it comes."""
    lines = _JsonLines() if options.json else _Lines()
    report = watch.run(dataclasses.replace(options.settings, listener=lines))
    if options.json:
        end = {"outcome": report.outcome, "readings": report.readings, "missed": report.missed}
        more = {"alarms": len(report.alarms), "problem": report.problem}
        print_json_line({"event": "end", **end, **more})
    else:
        color = {"ALARM": "bold red", "NO ALARM": "bold green"}.get(report.outcome, "bold yellow")
        reason = f": {report.problem}" if report.problem else ""
        stdout().line((report.outcome, color), reason)
    return EXIT_CODES[report.outcome]


class _JsonLines(OnTerminal):
    """Every event as one line of JSON on stdout."""

    @override
    def event(self, found: Mapping[str, Any]) -> None:
        print_json_line(found)


class _Lines(OnTerminal):
    """Every category of every reading in one line on stdout, an alarm on stderr too."""

    @override
    def event(self, found: Mapping[str, Any]) -> None:
        if found["event"] == "reading":
            for row in found["categories"]:
                stdout().line(f"{found['time']}  {_reading(row)}")
        elif found["event"] == "alarm":
            stdout().line((f"{found['time']}  ALARM", "bold red"), f" {_alarm(found)}")


def _reading(row: Mapping[str, Any]) -> str:
    name = f"{row['category']}: " if row["category"] else ""
    if row["acceptance_length"] is None:
        return f"{name}no verify steps since the last reading"
    return (
        f"{name}acceptance length {row['acceptance_length']:.3f} in {row['verify_steps']:,} verify"
        f" steps, {row['mean_acceptance_length']:.3f} in {row['all_verify_steps']:,} in all, golden"
        f" {row['golden']:.3f}; evidence of a fall {row['evidence']:.3g} of {row['alarm_at']:,.0f}"
    )


def _alarm(found: Mapping[str, Any]) -> str:
    name = f"{found['category']}: " if found["category"] else ""
    return (
        f"{name}the acceptance length fell from {found['golden']:.3f} to"
        f" {found['acceptance_length']:.3f} ({found['change']:+.1%}), in {found['verify_steps']:,}"
        f" verify steps since {found['since']}; it must not be below {found['limit']:.3f}"
    )
