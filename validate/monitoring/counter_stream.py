"""What counters counted between two readings, through restarts of servers and missed readings.

A counter never falls while its server runs. Where one does, the server was started again, and all
counters of that source (all labels but those by which one server divides its counters) count from
0. Where they fell by less than a tenth, a restart does not explain it (two servers behind one
address do, or two Prometheus): the source only says where its counters stand, like one that was not
there before. A source or counter that is missing is waited for.
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
_MOST = 2.0**53
"""Up to which every whole number is one of floating point."""
_LITTLE = 0.9
"""Share of what all counters of a source had, from which on a fall is no restart."""
_FELL_A_LITTLE = (
    "fell by less than a tenth, which no restart explains, so that its verify steps of this reading"
    " are not judged (is it the address of several servers, or of several Prometheus?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What was counted since the reading before.

    Attributes:
        sources: where every source stands now, also those that are missing in this reading.
        increments: as a page of counters; without sources that are new.
        fallen: what happened to each source whose counters fell, a sentence each.
    """

    sources: Sources
    increments: Counters
    fallen: tuple[str, ...]


def counted_since(before: Sources, page: Counters, engine: EngineCounters, where: str) -> Counted:
    """What was counted since.

    Args:
        before: where every source stood.
        page: a reading.
        engine: names and labels of its counters.
        where: the page, for errors.

    Raises:
        MeasureError: a counter is negative or no number, or verify steps are counted without the
            tokens that they accepted.
    """
    now: dict[str, dict[str, float]] = defaultdict(dict)
    shown: dict[tuple[str, str], tuple[str, Labels]] = {}
    for name, labels, value in _samples(page, engine, where):
        source, counter = _source(labels, engine), _counter(name, labels, engine)
        now[source][counter] = now[source].get(counter, 0) + value
        shown[source, counter] = name, labels
    fallen: list[str] = []
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for source, values in now.items():
        _check_whole(source, values, engine, where)
        old = before.get(source)
        if old is None:
            continue
        had = {counter: old.get(counter, 0) for counter in values}
        if any(value < had[counter] for counter, value in values.items()):
            if sum(values.values()) > _LITTLE * sum(had.values()):
                fallen.append(f"{where}: {_FELL_A_LITTLE}: {source}")
                continue
            fallen.append(f"{where}: counts from 0 again: {source}")
            old = {}
        now[source] = {**old, **values}
        for counter, value in values.items():
            name, labels = shown[source, counter]
            samples[name].append((labels, value - old.get(counter, 0)))
    missing = [source for source in before if source not in now][-_MOST_MISSING:]
    return Counted(
        sources={**{source: before[source] for source in missing}, **now},
        increments=Counters({name: tuple(found) for name, found in samples.items()}),
        fallen=tuple(fallen),
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
            if not (math.isfinite(value) and 0 <= value <= _MOST):
                raise MeasureError(
                    where,
                    f"expected a count of 0 or more (2^53 at most) at {name}, got {value:g}",
                    fix="look at the page: a proxy or a recording rule in between may change it",
                )
            yield name, labels, value


def _check_whole(source: str, values: Values, engine: EngineCounters, where: str) -> None:
    """Refuse verify steps of which nobody says what they accepted."""
    names = {counter.split(" ")[0] for counter in values}
    missing = [name for name in engine.needed if name not in names]
    if missing and engine.verify_steps.name in names:
        raise MeasureError(
            where,
            f"has {engine.verify_steps.name}, but no {missing[0]}, of {source}: the tokens that"
            " were accepted are not counted",
            fix="look at the page: a proxy or a relabelling in between may drop it",
        )


def _source(labels: Labels, engine: EngineCounters) -> str:
    parting = engine.position_label, engine.stream_label
    own = {key: text for key, text in labels.items() if key not in parting}
    return json.dumps(own, sort_keys=True)


def _counter(name: str, labels: Labels, engine: EngineCounters) -> str:
    parting = engine.position_label, engine.stream_label
    return " ".join((name, *(labels[key] for key in parting if key in labels)))
