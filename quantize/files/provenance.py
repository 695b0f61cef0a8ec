"""Provenance: who made a folder, from what and how; what draftquant.json holds."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...recipes.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the codes of a folder were found: what verification holds them against.

    Attributes:
        recipe: resolved.
        input_scales: stored static scale of a linear's input, by on-disk module name.
        balanced: on-disk name of a norm's weight -> k, by whose 2^k it was divided, while the
            columns that read it were multiplied.
    """

    recipe: Recipe
    input_scales: Mapping[str, float] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)


def package_version(name: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
