"""Readings: the counters of a server as they stand now."""

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...calibration.server_client import ServerClient
from ...recipes.errors import short
from ..errors import MeasureError, WatchError
from ..measure.measurement import EngineName
from ..measure.protocols.counters import Counters
from ..measure.protocols.engine_counters import ENGINE_COUNTERS, EngineCounters

_SWITCHED_ON = {
    "vllm": "start vLLM with --speculative-config, and without --disable-log-stats",
    "sglang": "start SGLang with --enable-metrics and --speculative-algorithm",
    "tensorrt-llm": "set return_perf_metrics: true and a speculative_config",
}
"""How each engine comes to count its verify steps."""


class Source(Protocol):
    """Where counters are read."""

    @property
    def where(self) -> str:
        """For errors."""

    @property
    def engine(self) -> EngineCounters:
        """Names and labels of the counters."""

    async def read(self) -> Counters:
        """The counters now.

        Raises:
            ServerError: no answer.
            MeasureError: an answer without counters of verify steps.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPage:
    """The page of counters of one engine's server.

    Attributes:
        client: of the server.
        name: of the engine.
        model: name of the served target; None = the only one.
    """

    client: ServerClient
    name: EngineName
    model: str | None

    @property
    def engine(self) -> EngineCounters:
        """Names and labels of the counters."""
        return ENGINE_COUNTERS[self.name]

    @property
    def where(self) -> str:
        """Address of the page."""
        return f"{self.client.url}{self.engine.path}"

    async def read(self) -> Counters:
        """See `Source`."""
        text = await self.client.get_text(self.engine.path)
        return with_verify_steps(
            Counters.parse(text, self.where), self.name, self.model, self.where
        )


def with_verify_steps(page: Counters, name: EngineName, model: str | None, where: str) -> Counters:
    """What the page says of one target.

    Raises:
        MeasureError: it counts no verify step, or not of this target, or of several if none is
            named.
    """
    engine = ENGINE_COUNTERS[name]
    if not page.samples.get(engine.verify_steps.name):
        raise MeasureError(
            where,
            f"has no counter {engine.verify_steps.name}: it is not {name}, or it drafts nothing",
            fix=f"{_SWITCHED_ON[name]}; or give the --engine that runs there",
        )
    values = _values(page, engine.verify_steps.name, engine.model_label)
    served = ", ".join(values) or "none"
    if model is None and len(values) > 1:
        raise MeasureError(where, f"counts verify steps of {len(values)} targets, and golden"
                           f" acceptance is of one: {served}",
                           fix="give one of these names as --model")  # fmt: skip
    if model is None:
        return page
    found = of_label(page, engine, engine.model_label, model)
    if not found.samples.get(engine.verify_steps.name):
        raise MeasureError(where, f"counts no verify step of {model!r}, but of {served}",
                           fix="give one of these names as --model")  # fmt: skip
    return found


def of_label(page: Counters, engine: EngineCounters, label: str, value: str) -> Counters:
    """The samples of an engine's counters with this label."""
    return Counters(
        {
            name: tuple(
                (own, n) for own, n in page.samples.get(name, ()) if own.get(label) == value
            )
            for name in engine.names
        },
        warnings=page.warnings,
    )


def _values(page: Counters, name: str, label: str) -> list[str]:
    return sorted({own[label] for own, _ in page.samples.get(name, ()) if label in own})


def by_label(page: Counters, engine: EngineCounters, label: str) -> Mapping[str, Counters]:
    """The samples of an engine's counters by the value of one label; "" = those without it."""
    values = {own.get(label, "") for name in engine.names for own, _ in page.samples.get(name, ())}
    return {
        value: Counters(
            {
                name: tuple(
                    (own, n) for own, n in page.samples.get(name, ()) if own.get(label, "") == value
                )
                for name in engine.names
            }
        )
        for value in sorted(values)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusServer:
    """The counters as a Prometheus has scraped them, of any number of servers.

    Attributes:
        client: of the Prometheus.
        name: of the engine.
        model: name of the served target; None = the only one.
        selector: labels that all series must have, in PromQL: `job="vllm",zone=~"a|b"`; "" = none.
    """

    client: ServerClient
    name: EngineName
    model: str | None
    selector: str

    @property
    def engine(self) -> EngineCounters:
        """Names and labels of the counters."""
        return ENGINE_COUNTERS[self.name]

    @property
    def where(self) -> str:
        """Address, and which series."""
        return f"{self.client.url}{_QUERY} {{{self.selector}}}"

    async def read(self) -> Counters:
        """See `Source`. One question asks for all counters, so that they are of one moment."""
        names = f'__name__=~"{"|".join(self.engine.names)}"'
        query = ",".join(filter(None, (names, self.selector.strip().rstrip(","))))
        asked = urllib.parse.urlencode({"query": f"{{{query}}}"})
        answer = await self.client.get_object(f"{_QUERY}?{asked}")
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for name, labels, value in _vector(answer, self.where):
            found.setdefault(name, []).append((labels, value))
        page = Counters(
            {name: tuple(own) for name, own in found.items()},
            warnings=tuple(_warnings(answer, self.where)),
        )
        return with_verify_steps(page, self.name, self.model, self.where)


def check_selector(selector: str) -> None:
    """Refuse what are no label matchers of PromQL.

    Raises:
        WatchError: they are none.
    """
    if not _MATCHERS.fullmatch(selector):
        raise WatchError(
            "--selector", f"expected labels such as job=\"vllm\", got {short(selector)}",
            fix="write NAME=\"VALUE\" (or !=, =~, !~), with commas between them",
        )  # fmt: skip
    if re.search(r"(^|,)\s*__name__\s*[=!]", selector):
        raise WatchError(
            "--selector", "has __name__, and the counters' names are those of --engine",
            fix="leave __name__ out",
        )  # fmt: skip


def _vector(answer: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Names, labels and values of an instant vector.

    Source: Prometheus 2.42, docs/querying/api.md, "Instant queries" and "Instant vectors".
    """
    data = answer.get("data")
    result = data.get("result") if isinstance(data, Mapping) else None
    if answer.get("status") != "success" or not isinstance(result, list):
        raise _no_vector(where, answer)
    for one in result:
        labels = one.get("metric") if isinstance(one, Mapping) else None
        value = one.get("value") if isinstance(one, Mapping) else None
        if not isinstance(labels, Mapping) or not isinstance(value, list) or len(value) != 2:
            raise _no_vector(where, one)
        try:
            number = float(str(value[1]))
        except ValueError as exc:
            raise _no_vector(where, value) from exc
        own = {str(key): str(text) for key, text in labels.items()}
        yield own.pop("__name__", ""), own, number


def _warnings(answer: Mapping[str, Any], where: str) -> Iterator[str]:
    """What the Prometheus could not see, such as a store that is down ("partial response")."""
    found = answer.get("warnings")
    for one in found if isinstance(found, list) else ():
        yield (
            f"{where}: the Prometheus warns of {short(one)}: what this reading lacks is made up for"
            " by a later one"
        )


def _no_vector(where: str, got: object) -> MeasureError:
    what = f"expected an instant vector of Prometheus, got {short(got)}"
    return MeasureError(where, what, fix="give the address of a Prometheus: http://HOST:9090")


_QUERY = "/api/v1/query"
_MATCHER = r'[a-zA-Z_]\w*\s*(=|!=|=~|!~)\s*"([^"\\\n]|\\.)*"'
_MATCHERS = re.compile(rf"\s*({_MATCHER}\s*(,\s*{_MATCHER}\s*)*,?)?\s*")
