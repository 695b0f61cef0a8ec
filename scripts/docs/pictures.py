"""Pictures."""

from collections.abc import Callable, Mapping

PICTURES: Mapping[str, Callable[[], str]] = {}
