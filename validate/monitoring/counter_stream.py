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
    for source, counter, value in _samples(page, engine, where):
        now[source][counter] = now[source].get(counter, 0) + value
    restarted, samples = [], defaultdict(list)
    for source, values in now.items():
        old = before.get(source)
        if old is None:
            continue
        if any(value < old.get(counter, 0) for counter, value in values.items()):
            restarted.append(source)
            old = {}
        for counter, value in values.items():
            name, position = json.loads(counter)
            at = {} if position is None else {engine.position_label: position}
            samples[name].append((json.loads(source) | at, value - old.get(counter, 0)))
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
) -> Iterator[tuple[str, str, float]]:
    """Source, counter, value."""
    for name in engine.names:
        for labels, value in page.samples.get(name, ()):
            if not (math.isfinite(value) and value >= 0):
                raise MeasureError(
                    where,
                    f"expected a count of 0 or more at {name}, got {value:g}",
                    fix="look at the page: a proxy or a recording rule in between may change it",
                )
            own = {key: text for key, text in labels.items() if key != engine.position_label}
            position = labels.get(engine.position_label) if engine.position_label else None
            yield json.dumps(own, sort_keys=True), json.dumps([name, position]), value
