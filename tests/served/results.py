"""results.json, RESULTS.md and README's table: what was served, beside what was replayed."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
JSON_FILE = HERE / "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One draft in the engine.

    Attributes:
        error: the engine's own words where it refuses the draft; then all counts are 0.
        acceptance_length: of all rounds of the engine. replayed: of all rounds of replay.
        num_rounds: of the engine. num_compared: that replay can judge, see `rounds`.
        num_equal: of those, in which both accept the same number.
        served_where_compared, replayed_where_compared: acceptance lengths of the compared rounds.
        num_same_text: prompts continued like the traces. num_same_as_alone: like the engine without
            a draft. num_prompts: all.
    """

    family: str
    draft: str
    error: str | None = None
    version: str = ""
    acceptance_length: float = 0.0
    replayed: float = 0.0
    num_rounds: int = 0
    num_compared: int = 0
    num_equal: int = 0
    served_where_compared: float = 0.0
    replayed_where_compared: float = 0.0
    num_same_text: int = 0
    num_same_as_alone: int = 0
    num_prompts: int = 0

    @property
    def difference(self) -> float:
        """Of the two acceptance lengths over the compared rounds, relative; 0 where refused."""
        if self.error is not None:
            return 0.0
        return abs(self.served_where_compared / self.replayed_where_compared - 1)


def write_results(served: Sequence[Served]) -> None:
    """Write results.json."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(each)) for each in served)
    JSON_FILE.write_text(f"[\n{rows}\n]\n")
