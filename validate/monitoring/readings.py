"""Readings: the counters of a server as they stand now."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...calibration.server_client import ServerClient
from ..errors import MeasureError
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
        model: name of the served target; None = all that it serves.
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
        MeasureError: it counts no verify step, or not of this target.
    """
    engine = ENGINE_COUNTERS[name]
    if not page.samples.get(engine.verify_steps.name):
        raise MeasureError(
            where,
            f"has no counter {engine.verify_steps.name}: it is not {name}, or it drafts nothing",
            fix=f"{_SWITCHED_ON[name]}; or give the --engine that runs there",
        )
    if model is None:
        return page
    found = of_label(page, engine, engine.model_label, model)
    if not found.samples.get(engine.verify_steps.name):
        served = ", ".join(_values(page, engine.verify_steps.name, engine.model_label))
        raise MeasureError(where, f"counts no verify step of {model!r}, but of {served or 'none'}",
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
        }
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
