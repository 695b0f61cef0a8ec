"""Which tool wrote a file is known by its content; the table of those that are read."""

import importlib
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import MeasureError
from ..measure.measurement_file import read_measurement
from .averages import refuse
from .foreign_files import PAGE, object_in, raw_lines
from .foreign_measurement import ForeignMeasurement, ForeignPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One file of one tool.

    Attributes:
        module: beside this one, with `claims` and `read`.
        tool: and which of its files. version: that was read. run: by which a file is written.
    """

    module: str
    tool: str
    version: str
    run: str

    def claims(self, first: object) -> bool:
        """Whether a first line, or a whole document, is of this format."""
        found: bool = self._function("claims")(first)
        return found

    def read(self, path: Path) -> ForeignMeasurement:
        """Everything that a verdict needs.

        Raises:
            MeasureError: the file is not what the tool writes, or lacks it.
        """
        found: ForeignMeasurement = self._function("read")(path)
        return found

    def _function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(
            importlib.import_module(f".{self.module}", __package__), name
        )
        return found


FORMATS: tuple[Format, ...] = (
    Format(
        module="aiperf",
        tool="AIPerf, profile_export.jsonl",
        version="0.13.0",
        run="aiperf profile --export-level raw",
    ),
    Format(
        module="guidellm",
        tool="GuideLLM, JSON report",
        version="0.8.1",
        run="guidellm run --output kind=json,path=F.json",
    ),
    Format(
        module="vllm_responses",
        tool="answers of vLLM, one to a line",
        version="0.32.0, 0.33.0",
        run="vllm run-batch -i IN.jsonl -o F.jsonl, or answers written by a client",
    ),
    Format(
        module="vllm_bench_serve",
        tool="vllm bench serve",
        version="0.32.0, 0.33.0",
        run="vllm bench serve --save-result --save-detailed",
    ),
    Format(
        module="sglang_requests",
        tool="request metrics of SGLang",
        version="0.5.23",
        run="launch_server --export-metrics-to-file --export-metrics-to-file-dir DIR",
    ),
)


def is_foreign(baseline: Path, candidate: Path) -> bool:
    """Whether one of two files is of another tool.

    Raises:
        MeasureError: one holds averages alone.
    """
    return any(foreign_format(path) is not None for path in (baseline, candidate))


def read_foreign_pair(baseline: Path, candidate: Path) -> ForeignPair:
    """Two measurements by one tool, which is not this package.

    Raises:
        MeasureError: one of them is none, or another tool measured one.
    """
    own, other = foreign_format(baseline), foreign_format(candidate)
    for path, found in ((baseline, own), (candidate, other)):
        if found is None:
            read_measurement(path)  # says what is wrong where it is none
    if own is None or other is None or own != other:
        tools = [one.tool if one else "'draftquant measure'" for one in (own, other)]
        raise MeasureError(
            candidate,
            f"is of {tools[1]}, and {baseline} is of {tools[0]}: tools count verify steps in"
            " different ways",
            fix="measure both drafts with one tool",
        )
    return ForeignPair(baseline=own.read(baseline), candidate=other.read(candidate))


def read_foreign(path: Path) -> ForeignMeasurement:
    """What another tool measured.

    Raises:
        MeasureError: it is none, or not what that tool writes.
    """
    found = foreign_format(path)
    if found is None:
        raise MeasureError(path, "is of no other tool that is known", fix=PAGE)
    return found.read(path)


def foreign_format(path: Path) -> Format | None:
    """Which tool's a file is; None = no other tool's that is known.

    Raises:
        MeasureError: it cannot be read, or holds averages alone.
    """
    first = _first(path)
    if isinstance(first, Mapping) and "format" in first:
        return None  # of this package
    for one in FORMATS:
        if one.claims(first):
            return one
    refuse(path, first)
    return None


def _first(path: Path) -> object:
    """The first line, parsed; the whole document where it has several lines; None = neither."""
    try:
        with open_stream(path) as stream:
            lines = raw_lines(stream, path)
            line = next((one for one in lines if one.removeprefix(BOM_UTF8).strip()), b"")
            rest = stream.read(1)
    except OSError:
        return None  # who reads it says why
    try:
        return parse_json(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, JsonProblem):
        if not rest or line.removeprefix(BOM_UTF8).strip() != b"{":
            return None
        return _whole(path)


def _whole(path: Path) -> object:
    try:
        return object_in(path)
    except MeasureError:
        return None
