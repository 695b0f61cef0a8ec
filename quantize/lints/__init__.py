"""Lints: config keys that trainers and engines interpret differently in a well-formed draft."""

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
