"""Prompts that are replayed already, kept beside a report until it is written.

A replay over all positions of many prompts in two dtypes takes long; a run that is killed goes on.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...calibration.traces.trace_folder import TraceFolder, file_sha256
from ...quantize.errors import OutputError
from ...quantize.files.resumable import resumable_folder, write_whole
from ...recipes.decode import encode
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from .every_position import EveryPosition

RECONCILING = "reconciling"
"""What the folder is for, and its ending behind the report's name."""
_ENDING = ".places.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BothDtypes:
    """Replay of one prompt by the draft in bfloat16, as engines compute, and in float32."""

    as_served: EveryPosition
    exact: EveryPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilingFolder:
    """A folder that `resumable_folder` has opened."""

    folder: Path

    @property
    def empty(self) -> bool:
        """Nothing is kept that a run could go on with."""
        return not any(self.folder.glob(f"*{_ENDING}"))

    def find(self, position: int) -> BothDtypes | None:
        """Of the prompt at this position of the traces; None = not replayed yet.

        Raises:
            OutputError: what lies there is not what was kept.
        """
        path = self._path(position)
        if not path.exists():
            return None
        try:
            found: BothDtypes = decode(BothDtypes, parse_object(read_text(path)))
        except (OSError, JsonProblem) as exc:
            raise OutputError(path, f"is not what was kept: {exc}",
                              fix=f"rm {path}, and run again") from exc  # fmt: skip
        return found

    def keep(self, position: int, both: BothDtypes) -> None:
        """Keep a prompt; it has its name when it is whole."""
        write_whole(self._path(position), json.dumps(encode(both)))

    def remove(self) -> None:
        """There is a report."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, position: int) -> Path:
        return self.folder / f"{position:06d}{_ENDING}"


@contextmanager
def kept_places(
    report: Path | None, measured: Path, traces: TraceFolder, draft_sha256: str
) -> Iterator[ReconcilingFolder | None]:
    """Where the prompts that are replayed are kept until there is a report; None without one.

    Raises:
        OutputError: those of another reconciliation are there, or another process is at it.
    """
    if report is None:
        yield None
        return
    folder = report.with_name(f"{report.name}.{RECONCILING}")
    plan = {
        "measurement_sha256": file_sha256(measured),
        "traces_sha256": traces.sha256,
        "draft_sha256": draft_sha256,
    }
    with resumable_folder(folder, RECONCILING, plan):
        kept = ReconcilingFolder(folder=folder)
        try:
            yield kept
        finally:
            if kept.empty:
                kept.remove()
