"""The gate's report: JSON that can be read again, a page, Markdown and JUnit."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath


@dataclass(frozen=True, kw_only=True)
class CardRequest(Heard):
    """What a card is to say beyond its folder; Hub ids where the record has none."""

    gate: AnyPath | None = None
    measured: Sequence[AnyPath] = ()
    base_model: str | None = None
    license: str | None = None
    name: str | None = None
