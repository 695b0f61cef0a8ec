"""The greedy search: from the narrowest mixture on, each time the widening that is worth most.

It trusts that costs add up: what a mixture costs is estimated as the sum of what each of its units
costs alone. The path that it finds is measured afterwards, whole mixtures and nothing estimated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .mixture import Mixture, Option, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One unit in one option, all others kept.

    Attributes:
        nbytes: of its linears, scales included.
        divergence: 1 - overlap with the proposals of the unquantized draft, in [0, 1]; 0 if kept.
    """

    nbytes: int
    divergence: float


Costs = Mapping[Unit, Mapping[Option, UnitCost]]
"""What each unit may become; at least one option each."""


def greedy_path(costs: Costs, allowed: Callable[[Mixture], bool]) -> Iterator[Mixture]:
    """Mixtures with more and more bytes and less and less estimated divergence.

    The first one takes the narrowest option of each unit; of options of equal size, the better.
    Every next one widens that unit which gains most per byte. A mixture that is not allowed is
    passed over, but the path goes on behind it.

    Args:
        costs: measured unit by unit.
        allowed: whether the layout can hold a mixture and an engine loads it.
    """
    mixture = {unit: _narrowest(options) for unit, options in costs.items()}
    while True:
        if allowed(mixture):
            yield dict(mixture)
        moves = [
            (_gain(costs[unit], mixture[unit], option), unit, option)
            for unit in costs
            for option in costs[unit]
        ]
        worth = [move for move in moves if move[0] > 0]
        if not worth:
            return
        _, unit, option = max(worth, key=lambda move: move[0])
        mixture[unit] = option


def _narrowest(options: Mapping[Option, UnitCost]) -> Option:
    return min(options, key=lambda option: (options[option].nbytes, options[option].divergence))


def _gain(options: Mapping[Option, UnitCost], now: Option, then: Option) -> float:
    """Divergence saved per byte added; 0 where a change is no widening, or saves nothing."""
    added = options[then].nbytes - options[now].nbytes
    saved = options[now].divergence - options[then].divergence
    return saved / added if added > 0 and saved > 0 else 0.0
