"""Lints: what trainers and engines read differently in a draft that is otherwise well-formed."""

from .catalogue import find_lints, output_changes
from .lint import Level, Lint, config_changes, fixed_config
from .vocabulary import check_vocabulary_map

__all__ = [
    "Level",
    "Lint",
    "check_vocabulary_map",
    "config_changes",
    "find_lints",
    "fixed_config",
    "output_changes",
]
