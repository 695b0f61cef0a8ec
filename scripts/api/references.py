"""What drafts, recipes and paths are given as, to several verbs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...quantize.files.hub import resolve_draft
from ...recipes.schema import Recipe

Reference = str | Path
"""A draft: its folder, or its id on the Hub (owner/name, owner/name@revision)."""
AnyRecipe = Recipe | Mapping[str, Any] | str | Path
"""A recipe: a built-in name, a file, a resolved recipe, or the keys of a file as a dict."""


def folder_of(reference: Reference) -> Path:
    """Where a draft lies; see `resolve_draft`."""
    return resolve_draft(str(reference)).folder


def optional_path(path: str | os.PathLike[str] | None) -> Path | None:
    """A path, where one is given."""
    return None if path is None else Path(path)
