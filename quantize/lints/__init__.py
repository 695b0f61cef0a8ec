"""Lints: what trainers and engines read differently in a draft that is otherwise well-formed."""

from ..drafts.lint import Level, Lint
from .catalogue import config_changes, find_lints, fixed_config, output_changes
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
