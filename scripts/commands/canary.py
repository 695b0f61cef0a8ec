"""`draftquant canary`: does a candidate accept as much as the baseline, on live traffic?"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..api.canary import CanaryReport, canary
from ..console import OnTerminal, print_json_line, stdout

if TYPE_CHECKING:
    from ...validate.monitoring.canary import Verdict

VERB = canary
EPILOG = (
    "exit codes: 0 PASS, the drop is smaller than the limit; 1 FAIL, it is larger; 2 bad input;"
    " 3 INCONCLUSIVE, or a server does not answer"
)
EXIT_CODES: "Mapping[Verdict, int]" = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


def run(options: argparse.Namespace) -> int:
    """Print every reading as it comes, and the verdict."""
    lines = _JsonLines() if options.json else _Lines()
    report = canary.run(dataclasses.replace(options.settings, listener=lines))
    if options.json:
        end = {"outcome": report.outcome, "readings": report.readings, "missed": report.missed}
        print_json_line({"event": "end", **end, "problem": report.problem})
    else:
        color = {"FAIL": "bold red", "PASS": "bold green"}.get(report.outcome, "bold yellow")
        stdout().line((report.outcome, color), _reason(report))
    return EXIT_CODES[report.outcome]


class _JsonLines(OnTerminal):
    """Every event as one line of JSON on stdout."""

    @override
    def event(self, found: Mapping[str, Any]) -> None:
        print_json_line(found)


class _Lines(OnTerminal):
    """Every reading in one line on stdout."""

    @override
    def event(self, found: Mapping[str, Any]) -> None:
        if found["event"] == "reading":
            stdout().line(f"{found['time']}  {_reading(found)}")


def _reading(found: Mapping[str, Any]) -> str:
    if found["change"] is None:
        return "not enough verify steps yet"
    arms = ", ".join(
        f"{name} {found[name]['mean_acceptance_length']:.3f} in"
        f" {found[name]['verify_steps']:,} verify steps"
        for name in ("baseline", "candidate")
    )
    return (
        f"{arms}; change {found['change']:+.2%} (bounds {found['low']:+.2%} and"
        f" {found['high']:+.2%})"
    )


def _reason(report: CanaryReport) -> str:
    judged = report.judged
    if judged is None or judged.change is None:
        return f": {report.problem}"
    return (
        f": the mean acceptance length changed by {judged.change:+.2%} (one-sided bounds, valid at"
        f" every reading: {judged.low:+.2%} and {judged.high:+.2%})"
    )
