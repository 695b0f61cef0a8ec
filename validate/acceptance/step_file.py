"""What a step found that has no file format of its own: the check of engines, the verification."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.report_files import write_reports
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import GateError
from .acceptance import StepFound


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepFile:
    format: Literal["draftquant acceptance step"] = "draftquant acceptance step"
    format_version: Literal[1] = 1
    found: StepFound
    report: object


def write_step(path: Path, found: StepFound, report: Mapping[str, object]) -> None:
    """Write what a step found, and the whole report that it is from.

    Raises:
        OutputError: it cannot be written, or exists.
    """
    said = dataclasses.asdict(_StepFile(found=found, report=dict(report)))
    write_reports({path: json.dumps(said, indent=2, allow_nan=False) + "\n"})


def read_step(path: Path) -> StepFound:
    """Read it again.

    Raises:
        GateError: it is no such file.
    """
    try:
        found: _StepFile = decode(_StepFile, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise GateError(
            path,
            f"is not what a step of 'draftquant accept' wrote: {exc}",
            fix=f"rm {path}, and run the same command again",
        ) from exc
    return found.found
