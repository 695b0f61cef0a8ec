"""Draft families: the role and expected shape of each tensor, and the forward pass."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from .families import FAMILIES as FAMILIES
    from .family import Draft as Draft
    from .family import Family as Family
    from .family import Row as Row
    from .recognition import read_config as read_config
    from .recognition import read_draft as read_draft

__all__, __getattr__ = lazy_names(__name__)
