"""`canary`: does a candidate accept as much as the baseline, both serving live traffic?"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...recipes.bounds import ABOVE_0, CONFIDENCE, SHARE
from ...recipes.brief import Brief
from ...recipes.errors import DraftQuantError
from ...validate.errors import GoldenError, WatchError
from ...validate.measure.measurement import EngineName
from .arguments import AnyPath, share
from .listener import Listener
from .option import Option
from .settings import Settings
from .verb import verb
from .watch import seconds_of

if TYPE_CHECKING:
    from ...validate.golden.golden import Golden
    from ...validate.monitoring.canary import Arm, Judged, Rule, Verdict
    from ...validate.monitoring.canary_watching import CanaryReading


@dataclass(frozen=True, slots=True)
class CanarySettings(Settings):
    """Which servers are compared, by which limit, and how long."""

    _: KW_ONLY
    server: Annotated[
        str,
        Option("address of the running server with the baseline draft, http://HOST:PORT; an API key"
               " is read from DRAFTQUANT_SERVER_KEY", "URL"),
    ]  # fmt: skip
    candidate: Annotated[
        str, Option("address of the running server with the candidate draft", "URL")
    ]
    golden: Annotated[
        AnyPath,
        Option("golden acceptance of either draft on such traffic, which says how much requests"
               " differ", "G.json"),
    ]  # fmt: skip
    engine: Annotated[
        EngineName | None,
        Option("engine that runs on both servers (default: the one that golden was measured on)"),
    ] = None
    model: Annotated[
        str | None,
        Option("name of the served target; what others count is left out", "NAME"),
    ] = None
    max_drop: Annotated[
        float,
        Option(
            "relative drop of the acceptance length that is tolerated (default 1%%, as the gate"
            " tolerates in a release)",
            "SHARE",
            reads=share,
            bounds=SHARE,
        ),
    ] = 0.01
    confidence: Annotated[
        float,
        Option(
            "confidence of each verdict (default 95%%)", "SHARE", reads=share, bounds=CONFIDENCE
        ),
    ] = 0.95
    every: Annotated[
        float,
        Option("seconds between two readings (default 60)", "SECONDS", bounds=ABOVE_0),
    ] = 60
    duration: Annotated[
        float | None,
        Option("end without a verdict after this time, such as 30m, 12h or 7d (default: never)",
               "TIME", flag="--for", reads=seconds_of, bounds=ABOVE_0),
    ] = None  # fmt: skip
    once: Annotated[
        bool, Option("end after one reading, which is compared with those in --state")
    ] = False
    state: Annotated[
        AnyPath | None,
        Option("file in which the comparison goes on after it was ended (default: it begins anew)",
               "FILE"),
    ] = None  # fmt: skip

    exclusive = (("once", "duration"),)

    def check(self) -> None:
        """Two servers, and a reading to compare with."""
        if _root(self.candidate) == _root(self.server):
            raise WatchError("--candidate", "is the same server as --server",
                             fix="give the address of the other one")  # fmt: skip
        if self.once and self.state is None:
            raise WatchError(
                "--once", "needs --state: counters say nothing without an earlier reading",
                fix="add --state canary.json, and run it again and again",
            )  # fmt: skip


def _root(url: str) -> str:
    """The address of a server, however it is written."""
    return url.lower().rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CanaryReport(Brief):
    """What a canary saw.

    Attributes:
        outcome: PASS: the drop is smaller than the limit; FAIL: it is larger; INCONCLUSIVE: it
            ended before either was shown.
        readings: of both servers. missed: without an answer of one.
        baseline, candidate: what each counted.
        judged: the change with its bounds, and the evidence; None where nothing was read.
        problem: why nothing was seen; "" where something was.
    """

    outcome: "Verdict"
    readings: int
    missed: int
    baseline: "Arm | None"
    candidate: "Arm | None"
    judged: "Judged | None"
    problem: str

    @override
    def brief(self) -> Mapping[str, object]:
        change = None if self.judged is None else self.judged.change
        steps = 0 if self.candidate is None else round(self.candidate.verify_steps)
        return {
            "outcome": self.outcome,
            "change": None if change is None else f"{change:+.2%}",
            "verify steps of the candidate": steps or None,
            "problem": self.problem or None,
        }


@verb(CanarySettings)
def canary(settings: CanarySettings) -> CanaryReport:
    """Compare the acceptance of two live drafts until it is shown which one holds.

    Returns:
        The outcome, the change with bounds, and what each server counted. Every reading is an event
        of the listener.

    Raises:
        GoldenError: golden acceptance cannot be read, or does not say how much its requests differ.
        MeasureError: a server has no counters of verify steps.
        ServerError: an address is none, or a server refuses to show them.
        WatchError: the state is of another canary, or the servers have different K, or are one.
    """
    from ...calibration.errors import NoAnswerError
    from ...quantize.files.report_files import check_place
    from ...validate.golden.golden_file import read_golden
    from ...validate.monitoring.canary import Rule

    golden = read_golden(Path(settings.golden))
    rule = Rule.of(golden, max_drop=settings.max_drop, confidence=settings.confidence)
    engine = settings.engine or (None if golden.source == "replay" else golden.source)
    if engine is None:
        raise GoldenError(
            "--engine",
            "is needed: golden acceptance of a replay does not say whose counters are read",
            fix="give --engine vllm, sglang or tensorrt-llm",
        )
    if settings.state is not None:
        check_place(Path(settings.state), overwrite=True)
    seen = _Seen(settings.listener)
    try:
        asyncio.run(_compare(settings, engine, golden, rule, seen))
    except NoAnswerError as exc:
        seen.problem = f"{exc.where}: {exc.what}"
    return seen.report()


async def _compare(
    settings: CanarySettings, engine: EngineName, golden: "Golden", rule: "Rule", seen: "_Seen"
) -> None:
    from ...calibration.server_client import KEY_VARIABLE, Patience, ServerClient
    from ...validate.golden.golden_file import golden_document
    from ...validate.monitoring.canary_state import KeptCanary, canary_identity
    from ...validate.monitoring.canary_watching import Servers, keep_comparing
    from ...validate.monitoring.readings import ServerPage
    from ...validate.monitoring.watching import Schedule

    key = os.environ.get(KEY_VARIABLE) or None
    patience = Patience(attempts=3, first_pause=0.5, seconds=10)

    def client(option: str, url: str) -> ServerClient:
        return ServerClient(url, key=key, most_in_flight=1, patience=patience, option=option)

    async with (
        client("--server", settings.server) as first,
        client("--candidate", settings.candidate) as second,
    ):
        servers = Servers(
            baseline=ServerPage(client=first, name=engine, model=settings.model),
            candidate=ServerPage(client=second, name=engine, model=settings.model),
        )
        kept = None
        if settings.state is not None:
            of = canary_identity(golden_document(golden), servers, settings.model, rule)
            kept = KeptCanary(path=Path(settings.state), of=of)
        await keep_comparing(
            servers,
            rule,
            Schedule(every=settings.every, seconds=settings.duration, once=settings.once),
            seen,
            canary=None if kept is None else kept.read(),
            kept=kept,
        )


class _Seen:
    """Hears of the readings, tells the listener, and remembers what the report says."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.readings, self.missed_readings = 0, 0
        self.last: CanaryReading | None = None
        self.problem = ""

    def reading(self, found: "CanaryReading") -> None:
        """See `Listening`."""
        self.readings += 1
        self.last = found
        for problem in found.problems:
            self.listener.warning(problem)
        self.listener.event({"event": "reading", "time": _time(found.time), **_row(found)})

    def missed(self, problem: DraftQuantError) -> None:
        """See `Listening`."""
        self.missed_readings += 1
        self.listener.warning(f"no reading: {problem}")
        self.listener.event(
            {"event": "missed", "time": _time(time.time()), "where": str(problem.where),
             "what": problem.what}
        )  # fmt: skip

    def report(self) -> CanaryReport:
        """What was seen."""
        last = self.last
        problem = self.problem
        if last is not None and last.comparison.blocks == 0:
            problem = "the servers have not counted enough verify steps to be compared"
        return CanaryReport(
            outcome="INCONCLUSIVE" if last is None else last.judged.verdict,
            readings=self.readings,
            missed=self.missed_readings,
            baseline=None if last is None else last.comparison.baseline,
            candidate=None if last is None else last.comparison.candidate,
            judged=None if last is None else last.judged,
            problem=problem,
        )


def _row(found: "CanaryReading") -> dict[str, Any]:
    comparison, judged = found.comparison, found.judged
    arms = {"baseline": comparison.baseline, "candidate": comparison.candidate}
    return {
        **{
            name: {
                "verify_steps": round(arm.verify_steps),
                "mean_acceptance_length": arm.mean_acceptance_length,
            }
            for name, arm in arms.items()
        },
        "change": judged.change,
        "low": judged.low,
        "high": judged.high,
        "evidence_pass": judged.evidence_pass,
        "evidence_fail": judged.evidence_fail,
        "verdict_at": judged.verdict_at,
        "dispersion": comparison.dispersion,
    }


def _time(seconds: float) -> str:
    """UTC, as 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
