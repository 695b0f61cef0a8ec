"""What counters counted between two readings, through restarts of servers and missed readings.

A counter never falls while its server runs. Where one does, the server was started again, and all
counters of that source (all labels but the position's) count from 0. A source that was not there
before only says where its counters stand. One that is missing is waited for.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import MeasureError
from ..measure.protocols.counters import Counters
from ..measure.protocols.engine_counters import EngineCounters

Labels = Mapping[str, str]
Values = Mapping[str, float]
"""Counter (name and position) -> value."""
Sources = Mapping[str, Values]
"""Labels of a source, as JSON -> its counters."""
_NO_SOURCES: Sources = MappingProxyType({})
_MOST_MISSING = 1000
"""Sources that are waited for, those that were seen last: replicas come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What was counted since the reading before.

    Attributes:
        sources: where every source stands now, also those that are missing in this reading.
        increments: as a page of counters; without sources that are new.
        restarted: sources whose counters fell.
    """

    sources: Sources
    increments: Counters
    restarted: tuple[str, ...]


def counted_since(before: Sources, page: Counters, engine: EngineCounters, where: str) -> Counted:
    """What was counted since.

    Args:
        before: where every source stood.
        page: a reading.
        engine: names and labels of its counters.
        where: the page, for errors.

    Raises:
        MeasureError: a counter is negative or no number.
    """
    now: dict[str, dict[str, float]] = defaultdict(dict)
    shown: dict[tuple[str, str], tuple[str, Labels]] = {}
    for name, labels, value in _samples(page, engine, where):
        source, counter = _source(labels, engine), _counter(name, labels, engine)
        now[source][counter] = now[source].get(counter, 0) + value
        shown[source, counter] = name, labels
    restarted: list[str] = []
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for source, values in now.items():
        old = before.get(source)
        if old is None:
            continue
        if any(value < old.get(counter, 0) for counter, value in values.items()):
            restarted.append(source)
            old = {}
        for counter, value in values.items():
            name, labels = shown[source, counter]
            samples[name].append((labels, value - old.get(counter, 0)))
    missing = [source for source in before if source not in now][-_MOST_MISSING:]
    return Counted(
        sources={**{source: before[source] for source in missing}, **now},
        increments=Counters({name: tuple(found) for name, found in samples.items()}),
        restarted=tuple(restarted),
    )


def where_they_stand(page: Counters, engine: EngineCounters, where: str) -> Sources:
    """Of a first reading; raises as `counted_since` does."""
    return counted_since(_NO_SOURCES, page, engine, where).sources


def _samples(
    page: Counters, engine: EngineCounters, where: str
) -> Iterator[tuple[str, Labels, float]]:
    """Name, labels, value."""
    for name in engine.names:
        for labels, value in page.samples.get(name, ()):
            if not (math.isfinite(value) and value >= 0):
                raise MeasureError(
                    where,
                    f"expected a count of 0 or more at {name}, got {value:g}",
                    fix="look at the page: a proxy or a recording rule in between may change it",
                )
            yield name, labels, value


def _source(labels: Labels, engine: EngineCounters) -> str:
    own = {key: text for key, text in labels.items() if key != engine.position_label}
    return json.dumps(own, sort_keys=True)


def _counter(name: str, labels: Labels, engine: EngineCounters) -> str:
    position = labels.get(engine.position_label)
    return name if position is None else f"{name} {position}"
