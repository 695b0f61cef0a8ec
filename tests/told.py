"""What is told, to the letter: texts that lie beside the tests, so that a change of one is seen.

With $DRAFTQUANT_TELL they are written anew, and `git diff` shows what has changed.
"""

import dataclasses
import functools
import hashlib
import inspect
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.frame.verb import Command

MOST, DEEP = 6, 3
"""Of more records the first and the last are told; and none in so many others."""
LONG, LONG_TEXT, MOST_LINES = 240, 4000, 60
"""Characters of a record's line and of a value, lines of a test: of what is longer, a digest."""
RECORD = re.compile(r"-?[\w.\[\]]*: |-? ?[({<]")
PRODUCT = ("draftquant.", "stand.")
"""What a module of tests has of these tells what it returns, and what it names in TOLD."""
EXACT = frozenset("""
    command_line comparison context_bins estimate family_refusals foreign_measurements
    gate_named_drafts gate_parts golden held_out help hub_dataset measure_engines measure_run
    measured_gate mistakes options pair_threads parity_divergence parity_tasks provenance report
    report_forms rope server_client size_curve stored_features traces
    """.split())  # fmt: skip # noqa: SIM905
"""Modules of tests whose figures are made by hand: kernels differ between machines."""
OTHER = {"began", "first_step", "latency", "python", "seconds", "share", "time_to_first_token",
         "time_per_output_token", "tokens_per_second", "torch", "transformers"}  # fmt: skip
"""Keys whose values differ between runs or machines, by a near tie or in a last digit."""
VERSIONS = [version(name) for name in ("draftquant", "torch", "transformers")]
KEPT = Path(__file__).with_name("told")
PATHS = re.compile(r"(?<![\w.:/])(?:/[\w.+-]+)+/([\w.+-]+)")
DECIMALS = re.compile(r"(?<![\w.])[-+]?[\d,]*\d\.\d+(?:e[-+]?\d+)?(?![\w.])")
HASH = re.compile(r"\b[0-9a-f]{12,}\b")
RULED = re.compile(r"(?m)^[ \u2500-\u257f]*\n|[ \u2500-\u257f]+$")
SPACED = re.compile(r"(?<=\S)[ \u2500-\u257f]{2,}")
MEASURED = re.compile(
    r"(?m)^.*(?:it/s\]|: \d+% of \d|% after|done in|running for|\d in \d|^memory |tokens/s| GB free"
    r"| \d+ s\b).*\n|-\d+(?= scheme=)"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d\S*|\d+ GB(?= of memory)|\b\d[\d.,]* (?:s|min)\b"
    r"|127\.0\.0\.1:\d+|0x[0-9a-f]{6,}|\u2026(?:\S*/)?|, line \d+|(?<=python3\.)\d+"
    r"|(?<=\.)\d+-\d+(?=-[0-9a-f]+\.staging)|(?<=ble=)\d+|(?<=ory=)\d+|[\d,]{9,}(?= free)"
)


def check_told(name: str, scenes: Mapping[str, Any]) -> None:
    """Each scene's text, or its value as JSON, is the one that is kept."""
    if os.environ.get("DRAFTQUANT_TELL") == "never":  # the oldest jinja2 and rich set otherwise
        return
    file = KEPT / f"{name}.txt"
    kept = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", kept, re.MULTILINE))
    texts = {scene: told if isinstance(told, str) else json_lines(json.loads(json.dumps(told)))
             for scene, told in scenes.items()}  # fmt: skip
    wanted = {scene: f"{without_version(text).strip()}\n\n" for scene, text in texts.items()}
    if os.environ.get("DRAFTQUANT_TELL"):
        found |= wanted
        text = "".join(f"## {scene}\n{found[scene]}" for scene in sorted(found))
        file.write_text(text, encoding="utf-8")
    for scene, text in wanted.items():
        assert text == found.get(scene, ""), scene


def without_version(text: str) -> str:
    """Nor those of what computes; as terminals and pages write them."""
    for own in VERSIONS:
        text = text.replace(own.replace(".", "&#46;", 1), "VERSION").replace(own, "VERSION")
    return text


def json_lines(value: Any, deep: int = 3) -> str:
    """JSON with a line for each thing that is said."""
    if not deep or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = (
        [f"{json.dumps(key)}: {json_lines(item, deep - 1)}" for key, item in value.items()]
        if isinstance(value, dict)
        else [json_lines(item, deep - 1) for item in value]
    )
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + "\n" + ",\n".join(inner) + "\n" + ends[1]


def lines_of(value: Any, place: str = "") -> Iterator[str]:
    """A line of a record's fields that are not empty, then its records; six decimals."""
    if isinstance(value, tuple | list) and is_record(value) and not hasattr(value, "_asdict"):
        for number, own in enumerate(value):
            if number in (0, len(value) - 1) or len(value) <= MOST:
                yield from lines_of(own, f"{place}[{number}]")
        return
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if not isinstance(value, Mapping):
        yield f"{place} {plain(value)}".strip()
        return
    packed = "zstd" in str(value.get("features"))  # to a size that CPUs differ in
    other = OTHER | {"nbytes"} if packed else OTHER
    value = {key: own for key, own in value.items() if key not in other}
    inner = {key: own for key, own in value.items() if is_record(own)}
    rest = [f"{key}={plain(own)}" for key, own in value.items() if key not in inner]
    if rest := [one for one in rest if not one.endswith("=")]:
        yield f"{place}: {' '.join(rest)}".removeprefix(": ")
    if place.count(".") < DEEP:
        for key, own in inner.items():
            yield from lines_of(own, f"{place}.{key}".removeprefix("."))


def is_record(value: Any) -> bool:
    """A record, or several of them."""
    one = hasattr(value, "_asdict") or dataclasses.is_dataclass(value)
    several = isinstance(value, tuple | list) and any(map(is_record, value))
    return one or several or isinstance(value, Mapping)


def plain(value: Any) -> str:
    """A value in words; none for what is empty."""
    if value is None or value is False or (isinstance(value, tuple | list) and not value):
        return ""
    if isinstance(value, tuple | list | set | frozenset):
        parts = map(plain, sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        return f"({', '.join(parts)})"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    own: Any = type(value)
    if callable(value) or object.__repr__ in (own.__repr__, own.__str__):
        return str(own.__name__)  # its address says nothing
    if isinstance(value, float):
        return f"{round(value, 6) + 0.0:.12g}"
    text = value if isinstance(value, str) else " ".join(str(value).split())
    return text if len(text) < LONG_TEXT else f"sha256 {digest(normal(text, exact=False))}"


def without_ids(sent: Any) -> Any:
    """What a server is asked, whatever the prompt and the seed: the same for all requests."""
    if isinstance(sent, Mapping):
        own = ("prompt", "input_ids", "seed", "request_id", "rid")
        return {key: key if key in own else without_ids(value) for key, value in sent.items()}
    return sent


def in_lines(printed: str) -> str:
    """What was printed, JSON as the lines of its records."""
    try:
        return "\n".join(lines_of(json.loads(printed)))
    except ValueError:
        return printed


def in_words(found: Any) -> str:
    """A verdict with all that is told beside it, and the figures of every part; or any record."""
    if not hasattr(found, "action"):
        return "\n".join(lines_of(found, "-"))
    told = found.verdict, found.reason, found.action, *getattr(found, "warnings", ())
    names = "required_num_prompts", "change", "drift", "categories", "context_bins", "served"
    figures = {name: own for name in names if is_record(own := getattr(found, name, None))}
    figures = {name: own for name, own in figures.items() if not hasattr(own, "verdict")}
    return "\n".join([*filter(None, told), *lines_of(figures)])


@pytest.fixture(autouse=True)
def _told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each everyday test tells what is refused, and what the product's functions return to it.

    And what servers are asked, in no order. Of `main`, the command line, it tells what is printed,
    the JSON, and what is brief of it. Decimals only where they are exact.
    """
    said: list[str] = []
    asked: set[str] = set()

    def listening(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            said.append(in_words(found))
            return found

        return call

    @contextmanager
    def refusing(*expected: Any, **options: Any) -> Iterator[Any]:
        with raises(*expected, **options) as caught:
            yield caught
        if isinstance(caught.value, DraftQuantError):
            said.append(f"{type(caught.value).__name__}: {caught.value}")

    def printing(arguments: Sequence[str], **options: Any) -> int:
        streams = io.StringIO(), io.StringIO()
        code: Any = "no exit code"
        try:
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                code = command(arguments, **options)
            return int(code)
        finally:
            out, err = (one.getvalue() for one in streams)
            sys.stdout.write(out)
            sys.stderr.write(err)
            text = f"{in_lines(out)}\n{err}"
            said.append(f"$ {shlex.join(map(str, arguments))}: {code}\n{text}")

    def both(command: Command, report: Any, settings: Any, *, as_json: bool) -> None:
        tell(command, report, settings, as_json=as_json)
        other = io.StringIO()
        with redirect_stdout(other), redirect_stderr(other):
            tell(command, report, settings, as_json=not as_json)
        brief = report.brief() if hasattr(report, "brief") else {}
        said.append("\n".join([in_lines(other.getvalue()), *lines_of(brief)]))

    def asking(client: Any, method: str, path: str, json: Any = None, **options: Any) -> Any:
        asked.add(" ".join([method, path.partition("?")[0], *lines_of(without_ids(json))]))
        return stream(client, method, path, json=json, **options)

    stream, tell = httpx2.AsyncClient.stream, Command.tell
    monkeypatch.setattr(httpx2.AsyncClient, "stream", asking)
    monkeypatch.setattr(Command, "tell", both)
    command, raises = vars(request.module).get("main"), pytest.raises
    monkeypatch.setattr(pytest, "raises", refusing)
    told = getattr(request.module, "TOLD", ())
    for name, own in [*vars(request.module).items()]:
        if inspect.isfunction(own) and (own.__module__.startswith(PRODUCT) or name in told):
            call = printing if name == "main" else listening(own)
            monkeypatch.setattr(request.module, name, call)
    yield
    module = request.path.stem.removeprefix("test_")
    said += sorted(asked)
    if said and not any(map(request.node.get_closest_marker, ("slow", "untold"))):
        check_told(module, {request.node.name: normal("\n".join(said), exact=module in EXACT)})


def normal(text: str, *, exact: bool) -> str:
    """Without what differs between runs and machines; each line once, of long ones the digest."""
    text = MEASURED.sub("", PATHS.sub(r"\1", f"\n{text}"))
    text = text if exact else DECIMALS.sub("0.0", text)
    text = HASH.sub(lambda found: f"HASH{len(found[0])}", text)
    text = SPACED.sub(" ", RULED.sub("", text)).replace("\n##", "\n ##").strip("\n")
    lines = [*map(shortened, dict.fromkeys(text.split("\n")))]
    rest = "\n".join(lines[MOST_LINES:])
    return "\n".join([*lines[:MOST_LINES], *([f"... {digest(rest)}"] if rest else [])])


def shortened(line: str) -> str:
    """A line of words, or the beginning of a record and its digest."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)
    whole = len(line) < LONG or not RECORD.match(line)
    return line if whole else f"{line[: LONG // 2]} ... {digest(line)}"


def digest(text: str) -> str:
    """In capitals, as no hash of a folder is written."""
    return hashlib.sha256(text.encode()).hexdigest()[:16].upper()
