"""Which mixtures are measured: each option everywhere, a greedy path, and one unit narrower.

The path begins with the narrowest mixture and widens, each time where that is worth most.

It trusts that costs add up: what a mixture costs is estimated as the sum of what each of its units
costs alone. The mixtures themselves are measured afterwards, whole, with nothing estimated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .draft_mixture import Mixture, Option, Unit


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


def uniform_mixtures(costs: Costs) -> Iterator[Mixture]:
    """Each option everywhere; what a unit cannot become, it does not: it is kept."""
    kept = {unit: _kept(options) for unit, options in costs.items()}
    for option in dict.fromkeys(option for options in costs.values() for option in options):
        yield {unit: option if option in costs[unit] else kept[unit] for unit in costs}


def narrowed_mixtures(
    costs: Costs, mixture: Mixture, allowed: Callable[[Mixture], bool]
) -> Iterator[Mixture]:
    """A mixture with one unit narrower: each in turn, by the next allowed option with less bytes.

    Args:
        costs: measured unit by unit.
        mixture: of the same units.
        allowed: see `greedy_path`.
    """
    for unit, options in costs.items():
        smaller = (each for each in options if options[each].nbytes < options[mixture[unit]].nbytes)
        for option in sorted(smaller, key=lambda each: -options[each].nbytes):
            narrower = {**mixture, unit: option}
            if allowed(narrower):
                yield narrower
                break


def _kept(options: Mapping[Option, UnitCost]) -> Option:
    return next(option for option in options if option.format is None)


def _narrowest(options: Mapping[Option, UnitCost]) -> Option:
    return min(options, key=lambda option: (options[option].nbytes, options[option].divergence))


def _gain(options: Mapping[Option, UnitCost], now: Option, then: Option) -> float:
    """Divergence saved per byte added; 0 where a change is no widening, or saves nothing."""
    added = options[then].nbytes - options[now].nbytes
    saved = options[now].divergence - options[then].divergence
    return saved / added if added > 0 and saved > 0 else 0.0
