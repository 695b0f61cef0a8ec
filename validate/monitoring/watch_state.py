"""The state of a watch as a file, by which it survives restarts of itself."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.report_files import write_reports
from ...recipes.decode import encode
from ..errors import WatchError
from .bets import LOSSES
from .drift import Detectors, Drift
from .state_file import OTHER, read_state_of

FORMAT: Literal["draftquant watch"] = "draftquant watch"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState:
    """What a watch knows between two readings.

    Attributes:
        of: what is watched, in words and figures: another watch does not go on with it.
        drift: where it stands.
    """

    format: Literal["draftquant watch"] = FORMAT
    schema_version: Literal[1] = 1
    of: Mapping[str, str]
    drift: Drift


def write_state(path: Path, state: WatchState) -> None:
    """Write it whole, in the place of the one before.

    Raises:
        OutputError: it cannot be written.
    """
    write_reports({path: json.dumps(encode(state), allow_nan=False) + "\n"}, overwrite=True)


def read_state(path: Path, of: Mapping[str, str]) -> Drift | None:
    """Where the watch stood; None where there is no file yet.

    Args:
        path: of the file.
        of: what is watched now.

    Raises:
        WatchError: it cannot be read, is something else, or of another watch.
    """
    state = read_state_of(WatchState, "watch", path, of)
    if state is None:
        return None
    _check(path, state.drift, of["categories"])
    return state.drift


def _check(path: Path, drift: Drift, categories: str) -> None:
    """Refuse evidence of other categories, or not of as many bets as there are."""
    if (names := _listed(drift.tallies)) != categories:
        raise WatchError(path, f"expected evidence of {categories}, got {names}", fix=OTHER)
    for name, tally in drift.tallies.items():
        own = tally.evidence
        if {len(own.log_sums), len(own.log_best), len(own.since)} != {len(LOSSES)}:
            raise WatchError(path, f"category {name!r}: expected {len(LOSSES)} bets", fix=OTHER)


def _listed(categories: Iterable[str]) -> str:
    return ", ".join(name or "all" for name in categories)


def identity(golden: str, where: str, model: str | None, detectors: Detectors) -> dict[str, str]:
    """What is watched, of which a state is.

    Args:
        golden: the document of golden acceptance.
        where: the counters are read.
        model: name of the served target; None = all.
        detectors: what is watched.
    """
    return {
        "golden_sha256": hashlib.sha256(golden.encode()).hexdigest(),
        "counters": where,
        "model": model or "all",
        "categories": _listed(detectors.limits),
        "category_label": detectors.category_label or "none",
        "limits": ", ".join(f"{one.lowest:.9g}" for one in detectors.limits.values()),
        "alpha": f"{detectors.alpha:.9g}",
    }
