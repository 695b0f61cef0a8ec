"""A draft beside its target: whether the two fit, in each engine, before any server is started."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from .pair import EnginePair as EnginePair
    from .pair import PairCheck as PairCheck
    from .pair import PairFinding as PairFinding
    from .pair_check import check_pair as check_pair

_HOMES = {
    "EnginePair": ".pair",
    "PairCheck": ".pair",
    "PairFinding": ".pair",
    "check_pair": ".pair_check",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
