"""Draft families: what each tensor of a draft is, its expected shape, and the forward maths."""

from .family import Draft, Family, Row
from .reading import read_config, read_draft
from .registry import FAMILIES

__all__ = ["FAMILIES", "Draft", "Family", "Row", "read_config", "read_draft"]
