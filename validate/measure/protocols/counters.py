"""Counters of a server in Prometheus' text format."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ....recipes.errors import short
from ...errors import MeasureError

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?"
)
_LONGEST_LINE = 10_000  # a search for labels takes the square of it
_LABEL = re.compile(r'\s*(\w+)="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")
"""In a label's value: backslash, quotation mark, and n for the end of a line."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples by name, each with its labels.

    Attributes:
        samples: in the order of the page.
    """

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    @classmethod
    def parse(cls, text: str, where: str) -> "Counters":
        """Read an exposition.

        Args:
            text: as a server's /metrics gives it; comments are skipped.

        Raises:
            MeasureError: a line is no sample.
        """
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for line in text.split("\n"):
            if not line.strip() or line.startswith("#"):
                continue
            match = _SAMPLE.fullmatch(line.strip()) if len(line) <= _LONGEST_LINE else None
            value = None if match is None else _number(match["value"])
            if match is None or value is None:
                raise MeasureError(where, f"expected counters of Prometheus, got {short(line)}",
                                   fix="give the address of an engine's server")  # fmt: skip
            found = _LABEL.findall(match["labels"] or "")
            labels = {name: _ESCAPED.sub(_unescaped, value) for name, value in found}
            samples[match["name"]].append((labels, value))
        return cls({name: tuple(found) for name, found in samples.items()})

    def total(self, name: str) -> int | None:
        """Sum over all that has the name; None where the server has no such counter."""
        found = self.samples.get(name)
        if found is None:
            return None
        return _whole(value for _, value in found)

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums over all engines, by the value of one label."""
        values: dict[str, list[float]] = defaultdict(list)
        for labels, value in self.samples.get(name, ()):
            values[labels.get(label, "")].append(value)
        return {key: _whole(found) for key, found in values.items()}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(values: Iterable[float]) -> int:
    """Counters are whole; what is no number counts nothing."""
    return sum(round(value) for value in values if math.isfinite(value))
