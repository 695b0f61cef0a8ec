"""Where prompts come from that were taken out of a data set of the Hub, as trace.json says it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.errors import short
from .names import LONGEST_NAME, is_printable_name

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """Rows of a data set of the Hugging Face Hub.

    Attributes:
        name: owner/name. revision: hash of the commit. config, split: as the Hub calls them.
        column: that held the prompts, where one was named; None = the one that is known.
        seed: of the choice of rows; None = all rows.
    """

    name: str
    revision: str
    config: str
    split: str
    column: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        column = f", column {self.column}" if self.column else ""
        rows = "all rows" if self.seed is None else f"rows drawn with seed {self.seed}"
        return f"{self.name}@{self.revision[:12]}, {self.config}/{self.split}{column}, {rows}"


def datasets_problem(datasets: Sequence[DatasetSource] | None) -> str | None:
    """What is wrong with the key of trace.json; None where nothing is."""
    if datasets is None:
        return None
    if not datasets:
        return "datasets: expected one at least, or no key"
    for one in datasets:
        if not _COMMIT.fullmatch(one.revision):
            return f"datasets: revision: expected 40 hex digits, got {short(one.revision)}"
        names = (one.name, one.config, one.split, *([one.column] if one.column else []))
        if not all(map(is_printable_name, names)):
            return f"datasets: expected names of 1 to {LONGEST_NAME} printable characters"
    return None
