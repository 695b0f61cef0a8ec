"""Draft families: what each tensor of a draft is, its expected shape, and the forward maths."""

from .families import FAMILIES
from .family import Draft, Family, Row
from .recognition import read_config, read_draft

__all__ = ["FAMILIES", "Draft", "Family", "Row", "read_config", "read_draft"]
