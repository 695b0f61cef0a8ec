"""`watch`: has the acceptance of a live draft fallen?"""

import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import override

from ...recipes.bounds import ABOVE_0, SHARE
from ...recipes.brief import Brief
from ...recipes.decode import MisfitError
from ...recipes.errors import short
from ...validate.errors import GoldenError, WatchError
from ...validate.measure.measurement import EngineName
from .arguments import AnyPath, share
from .option import Option
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...validate.golden.golden import Golden
    from ...validate.monitoring.drift import Detectors, Standing
    from .watch_events import Seen

Outcome = Literal["NO ALARM", "ALARM", "NOT ENOUGH"]
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str) -> float:
    """A time as people write it, in seconds: 90, 90s, 30m, 12h, 7d.

    Raises:
        MisfitError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if match is None:
        raise MisfitError(f"expected a time such as 30m, 12h or 7d, got {short(text)}")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, slots=True)
class WatchSettings(Settings):
    """Which server is watched, against which golden acceptance, and how long."""

    _: KW_ONLY
    golden: Annotated[
        AnyPath,
        Option("golden acceptance of the draft that is served, written by --golden of another"
               " command", "G.json"),
    ]  # fmt: skip
    server: Annotated[
        str | None,
        Option(
            "address of the running server, http://HOST:PORT; an API key is read from"
            " DRAFTQUANT_SERVER_KEY",
            "URL",
        ),
    ] = None
    prometheus: Annotated[
        str | None,
        Option("address of a Prometheus that scrapes the servers, instead of --server", "URL"),
    ] = None
    selector: Annotated[
        str,
        Option("with --prometheus: labels of the series, such as 'job=\"vllm\"'", "LABELS"),
    ] = ""
    engine: Annotated[
        EngineName | None,
        Option("engine that runs on the server (default: the one that golden was measured on)"),
    ] = None
    model: Annotated[
        str | None,
        Option("name of the served target; what others count is left out", "NAME"),
    ] = None
    category: Annotated[
        str | None,
        Option("category of golden that the traffic is like (default: all)", "CATEGORY"),
    ] = None
    category_label: Annotated[
        str | None,
        Option("label of the counters whose values are categories of golden: each is judged by"
               " itself", "NAME"),
    ] = None  # fmt: skip
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
    alpha: Annotated[
        float,
        Option("false alarms per day, at most (default 0.01)", "SHARE", reads=share, bounds=SHARE),
    ] = 0.01
    every: Annotated[
        float,
        Option("seconds between two readings (default 60)", "SECONDS", bounds=ABOVE_0),
    ] = 60
    duration: Annotated[
        float | None,
        Option("end after this time, such as 30m, 12h or 7d (default: never)", "TIME",
               flag="--for", reads=seconds_of, bounds=ABOVE_0),
    ] = None  # fmt: skip
    once: Annotated[
        bool, Option("end after one reading, which is compared with the one in --state")
    ] = False
    until_alarm: Annotated[bool, Option("end with the first alarm")] = False
    webhook: Annotated[str | None, Option("post every alarm to this address as JSON", "URL")] = None
    state: Annotated[
        AnyPath | None,
        Option("file in which the watch goes on after it was ended (default: it begins anew)",
               "FILE"),
    ] = None  # fmt: skip

    exclusive = (("category", "category_label"), ("once", "duration"))
    one_of = (("server", "prometheus"),)

    def check(self) -> None:
        """One reading needs another one, and labels a Prometheus."""
        if self.selector and self.prometheus is None:
            raise WatchError("--selector", "is of series in a Prometheus",
                             fix="add --prometheus URL, or leave it out")  # fmt: skip
        if self.once and self.state is None:
            raise WatchError(
                "--once", "needs --state: counters say nothing without an earlier reading",
                fix="add --state watch.json, and run it again and again",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WatchReport(Brief):
    """What a watch saw.

    Attributes:
        outcome: "ALARM" if there was one; "NOT ENOUGH" where no verify step was counted between two
            readings, or the server did not answer.
        readings: that were compared with one before.
        missed: readings without an answer.
        alarms: one for each category and fall, in order.
        categories: where each stands after the last reading, by name, "" = all.
        problem: why nothing was seen; "" where something was.
    """

    outcome: Outcome
    readings: int
    missed: int
    alarms: tuple[Mapping[str, Any], ...]
    categories: "Mapping[str, Standing]"
    problem: str

    @override
    def brief(self) -> Mapping[str, object]:
        steps = sum(one.all_verify_steps for one in self.categories.values())
        return {
            "outcome": self.outcome,
            "alarms": len(self.alarms) or None,
            "readings": self.readings,
            "verify steps": steps or None,
            "problem": self.problem or None,
        }


@verb(WatchSettings)
def watch(settings: WatchSettings) -> WatchReport:
    """Watch the acceptance of a live draft, and alarm when it fell below golden.

    Returns:
        The outcome, the alarms, and where each category stands. Every reading and alarm is an event
        of the listener.

    Raises:
        GoldenError: golden acceptance cannot be read, lacks the category, or does not say how much
            its requests differ.
        MeasureError: the server has no counters of verify steps.
        ServerError: the address is none, or the server refuses to show them.
        WatchError: the state is of another watch, or the server has another K than golden.
    """
    import asyncio

    from ...calibration.errors import NoAnswerError
    from ...quantize.files.report_files import check_place
    from ...validate.golden.golden_file import read_golden
    from ...validate.measure.protocols.engine_counters import ENGINE_COUNTERS
    from ...validate.monitoring.drift import Detectors
    from ...validate.monitoring.readings import check_selector
    from ...validate.monitoring.webhook import Webhook
    from .watch_events import Seen

    golden = read_golden(Path(settings.golden))
    engine = _engine(settings, golden)
    detectors = Detectors.of(
        golden,
        ENGINE_COUNTERS[engine],
        category=settings.category or "",
        category_label=settings.category_label,
        max_drop=settings.max_drop,
        alpha=settings.alpha,
    )
    if settings.state is not None:
        check_place(Path(settings.state), overwrite=True)
    check_selector(settings.selector)
    webhook = None if settings.webhook is None else Webhook(settings.webhook)
    if webhook is not None:
        webhook.check()
    seen = Seen(golden=golden, listener=settings.listener, webhook=webhook)
    seen.begin(detectors)
    try:
        asyncio.run(_watch(settings, engine, golden, detectors, seen))
    except NoAnswerError as exc:
        seen.problem = f"{exc.where}: {exc.what}"
    return _report(seen)


def _engine(settings: WatchSettings, golden: "Golden") -> EngineName:
    measured = None if golden.source == "replay" else golden.source
    engine = settings.engine or measured
    if engine is None:
        raise GoldenError(
            "--engine",
            "is needed: golden acceptance of a replay does not say whose counters are read",
            fix="give --engine vllm, sglang or tensorrt-llm",
        )
    return engine


async def _watch(
    settings: WatchSettings,
    engine: EngineName,
    golden: "Golden",
    detectors: "Detectors",
    seen: "Seen",
) -> None:
    from ...calibration.server_client import KEY_VARIABLE, Patience, ServerClient
    from ...validate.golden.golden_file import golden_document
    from ...validate.monitoring.readings import PrometheusServer, ServerPage, Source
    from ...validate.monitoring.watch_state import identity, read_state
    from ...validate.monitoring.watching import Kept, Schedule, keep_watching

    key = os.environ.get(KEY_VARIABLE) or None
    patience = Patience(attempts=3, first_pause=0.5, seconds=10)
    url = settings.server or settings.prometheus
    assert url is not None  # see `one_of`
    option = "--server" if settings.prometheus is None else "--prometheus"
    async with ServerClient(
        url, key=key, most_in_flight=1, patience=patience, option=option
    ) as client:
        source: Source = ServerPage(client=client, name=engine, model=settings.model)
        if settings.prometheus is not None:
            source = PrometheusServer(
                client=client, name=engine, model=settings.model, selector=settings.selector
            )
        kept = drift = None
        if settings.state is not None:
            of = identity(golden_document(golden), source.where, settings.model, detectors)
            kept = Kept(path=Path(settings.state), of=of)
            drift = read_state(kept.path, of)
        schedule = Schedule(
            every=settings.every,
            seconds=settings.duration,
            once=settings.once,
            until_alarm=settings.until_alarm,
        )
        await keep_watching(source, detectors, schedule, seen, drift=drift, kept=kept)


def _report(seen: "Seen") -> WatchReport:
    """What was seen."""
    outcome: Outcome = "NO ALARM" if seen.verify_steps else "NOT ENOUGH"
    if seen.readings and not seen.verify_steps:
        seen.problem = "no verify step was counted between the readings"
        if seen.warned:
            seen.problem += ", or none that can be judged: see the warnings"
    return WatchReport(
        outcome="ALARM" if seen.alarms else outcome,
        readings=seen.readings,
        missed=seen.missed_readings,
        alarms=tuple(seen.alarms),
        categories=seen.categories,
        problem="" if seen.verify_steps else seen.problem,
    )
