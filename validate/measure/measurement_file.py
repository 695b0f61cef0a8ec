"""Measurements as files: JSON lines, the setup first, then a record for each prompt, in order.

An unfinished one is beside it as `OUT.measuring`, whose records are in the order in which
they came, each flushed to the disk. Its last line may be cut off if the run was killed.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...quantize.files.result_cache import differences, refuse_other_work, take_alone
from ...quantize.files.staging import check_output, sync, write_text
from ...recipes.decode import encode, problem_of
from ...recipes.errors import MeasureError, OutputError
from ...recipes.regular_file import open_kept, open_stream
from ...recipes.strict_json import JsonProblem, decode, parse_object, reading
from .measurement import (
    Measurement,
    RequestRecord,
    Setup,
    prompts_sha256,
    record_problem,
    setup_problem,
)

_LONGEST_LINE = 64 * 2**20  # bytes; 100,000 tokens with log-probabilities have 6 MB
_MOST_BYTES = 2 * 2**30  # 10,000 prompts of 2,000 tokens with log-probabilities have 1.2 GB
_OURS = (
    "give what `draftquant measure` wrote, or measure again; docs/servers.md says which"
    " files of other tools are read"
)


def read_measurement(path: Path) -> Measurement:
    """Read a whole measurement, named as the file; MeasureError names the line that is wrong."""
    lines = numbered_lines(path)
    number, text = next(lines, (1, b""))
    setup = read_setup(text, f"{path}:{number}")
    records = [read_record(text, setup, f"{path}:{number}") for number, text in lines]
    if not records:
        raise MeasureError(path, "holds no record", fix=_OURS)
    digest = prompts_sha256((r.id, r.category, r.prompt_sha256) for r in records)
    if digest != setup.asked.prompts_sha256:
        (most, count), *_ = Counter(record.id for record in records).most_common()
        what = f"its {len(records)} records are not those of the prompts that were asked"
        what = f"id {most!r} stands on two lines" if count > 1 else what
        raise MeasureError(path, what, fix=_OURS)
    return Measurement(name=path.name, setup=setup, records=tuple(records))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number, from 1, and with its line end if it has one."""
    size = number = 0
    with reading(path, MeasureError, _OURS), open_stream(path) as stream:
        while line := stream.readline(_LONGEST_LINE + 1):
            number, size = number + 1, size + len(line)
            if len(line) > _LONGEST_LINE or size > _MOST_BYTES:
                most = _LONGEST_LINE if len(line) > _LONGEST_LINE else _MOST_BYTES
                what = f"more than {most:,} bytes, which no measurement has"
                raise MeasureError(f"{path}:{number}", what, fix=_OURS)
            yield number, line


def read_setup(line: bytes, where: str) -> Setup:
    """The first line, else MeasureError."""
    setup: Setup = _decoded(Setup, line, where)
    if problem := setup_problem(setup):
        raise MeasureError(where, problem, fix=_OURS)
    return setup


def read_record(line: bytes, setup: Setup, where: str) -> RequestRecord:
    """Any other line; MeasureError if it is not a record, or contradicts itself or the setup."""
    record: RequestRecord = _decoded(RequestRecord, line, where)
    if problem := record_problem(record, setup):
        raise MeasureError(where, f"prompt {record.id}: {problem}", fix=_OURS)
    return record


def line_of(value: Setup | RequestRecord) -> str:
    """The line of a setup or record, with the line end; pure ASCII."""
    return json.dumps(encode(value)) + "\n"


def _decoded(kind: type, line: bytes, where: str) -> Any:
    try:
        return decode(kind, parse_object(line.decode("utf-8")))
    except (UnicodeDecodeError, JsonProblem) as exc:
        what = "a setup" if kind is Setup else "a record"
        raise MeasureError(where, f"is not {what} of a measurement: {exc}", fix=_OURS) from exc


MEASURING = ".measuring"
"""Suffix of the output's name."""


class KeptRecords:
    """Records of a measurement so far, by prompt; `dropped_line`: the last was cut off."""

    def __init__(self, out: Path, descriptor: int, setup: Setup) -> None:
        self.path = out.with_name(out.name + MEASURING)
        self.records: dict[str, RequestRecord] = {}
        self.dropped_line = self._is_broken = False
        self._out, self._descriptor, self._setup = out, descriptor, setup
        self._read()

    def add(self, record: RequestRecord) -> None:
        """Keep a record, which is on disk when this returns; MeasureError if that fails."""
        problem = problem_of(record) or record_problem(record, self._setup)
        if problem is None and record.id in self.records:
            problem = "was answered twice"
        if problem:
            raise MeasureError(f"prompt {record.id}", problem, fix="look at the server's log")
        self._append(line_of(record))
        self.records[record.id] = record

    def publish(self, prompt_ids: Sequence[str]) -> Measurement:
        """Give the output its name, with records in the order of all prompts."""
        records = tuple(self.records[prompt_id] for prompt_id in prompt_ids)
        unfinished = self.path.with_name(f"{self.path.name}.sorted")
        try:
            lines = (line_of(self._setup), *map(line_of, records))
            write_text(unfinished, "".join(lines))
            check_output(self._out)
            unfinished.rename(self._out)
            sync(self._out.absolute().parent)
        except OSError as exc:
            raise _unwritable(self._out, exc) from exc
        finally:
            unfinished.unlink(missing_ok=True)
        self.path.unlink()
        return Measurement(name=self._out.name, setup=self._setup, records=records)

    def _read(self) -> None:
        """Read what an earlier run kept; a file without a whole first line is begun anew."""
        whole = 0  # bytes
        for number, line in numbered_lines(self.path):
            if not line.endswith(b"\n"):
                self.dropped_line = True
                break
            whole += len(line)
            where = f"{self.path}:{number}"
            if number == 1:
                refuse_other_work(
                    self.path,
                    "measurement",
                    setup_differences(read_setup(line, where), self._setup),
                    given="arguments and server",
                    remove=f"rm {self.path}",
                )
                continue
            record = read_record(line, self._setup, where)
            if record.id in self.records:
                raise MeasureError(where, f"prompt {record.id} stands on an earlier line too",
                                   fix=f"rm {self.path}, and measure again")  # fmt: skip
            self.records[record.id] = record
        os.ftruncate(self._descriptor, whole)
        if not whole:
            self.dropped_line = False
            self._append(line_of(self._setup))

    def _append(self, line: str) -> None:
        """Write a line; nothing may follow a line that was cut off."""
        if self._is_broken:
            raise OutputError(self.path, "cannot be written, as before", fix="free some space")
        data = memoryview(line.encode())
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as exc:
            self._is_broken = True
            raise _unwritable(self.path, exc) from exc


@contextmanager
def kept_records(out: Path, setup: Setup) -> Iterator[KeptRecords]:
    """Begin a measurement, or resume one with the same setup, with exclusive use."""
    path = out.with_name(out.name + MEASURING)
    try:
        descriptor = open_kept(path)
    except OSError as exc:
        raise _unwritable(path, exc) from exc
    try:
        take_alone(path, descriptor, path, "measuring")
        kept = KeptRecords(out, descriptor, setup)
        try:
            yield kept
        finally:
            if not kept.records:  # nothing to resume from
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def setup_differences(begun: Setup, now: Setup) -> tuple[str, ...]:
    """How two setups differ, one line each; the version of draftquant may."""
    without = (dataclasses.replace(setup, draftquant="") for setup in (begun, now))
    return differences(*(dict(_leaves(setup)) for setup in without))


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, item in value.items():
        yield from _leaves(item, f"{key}.{name}" if key else name)


def _unwritable(path: Path, exc: OSError) -> OutputError:
    why = exc.strerror or exc
    return OutputError(
        path,
        f"cannot be written: {why}",
        fix="free some space or choose another place, and run again: what is kept stays",
    )
