"""Draft families: what each tensor of a draft is, which shape it must have, and its forward maths."""

from .family import Draft, Family, Row
from .registry import FAMILIES, read_draft

__all__ = ["FAMILIES", "Draft", "Family", "Row", "read_draft"]
