"""Lints: config keys that trainers and engines interpret differently in a well-formed draft."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from ..drafts.family import Level as Level
    from ..drafts.family import Lint as Lint
    from .catalogue import config_changes as config_changes
    from .catalogue import find_lints as find_lints
    from .catalogue import fixed_config as fixed_config
    from .catalogue import output_changes as output_changes
    from .vocabulary_lints import check_vocabulary_map as check_vocabulary_map

_HOMES = {
    "Level": "..drafts.family",
    "Lint": "..drafts.family",
    "check_vocabulary_map": ".vocabulary_lints",
    "config_changes": ".catalogue",
    "find_lints": ".catalogue",
    "fixed_config": ".catalogue",
    "output_changes": ".catalogue",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
