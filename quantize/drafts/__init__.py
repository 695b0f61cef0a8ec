"""Draft families: the role and expected shape of each tensor, and the forward pass."""

from .families import FAMILIES
from .family import Draft, Family, Row
from .recognition import read_config, read_draft

__all__ = ["FAMILIES", "Draft", "Family", "Row", "read_config", "read_draft"]
