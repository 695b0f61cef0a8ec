"""Which everyday test runs which line of the product: recorded while the tests run.

`pytest -p draftquant.scripts.dev.mutants.recording` keeps it in build/mutants.jsonl, as CI does:
all lines, then each test with the numbers of those that it runs, and its CPU seconds. A line is
known by its text and that of the line above, so it serves later trees, too. Delete it to see anew.
"""

import ast
import builtins
import json
import os
import re
import shutil
import time
from collections.abc import Generator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

KEPT = Path("build", "mutants.jsonl")
ROOMS = ("recipes", "quantize", "calibration", "validate", "scripts")


def product(root: Path, suffix: str) -> dict[str, bytes]:
    """The product's modules or tables by their paths below the root; not developers' tools."""
    files = (file for room in ROOMS for file in sorted((root / room).rglob(f"*{suffix}")))
    texts = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    return {path: text for path, text in texts.items() if not path.startswith("scripts/dev/")}


def known(path: str, lines: Sequence[str], number: int) -> str:
    """What a line is known by."""
    return f"{path}: {' '.join(' '.join(lines[max(0, number - 2) : number]).split())}"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before any module of the product is imported."""
    early_config.pluginmanager.register(Recorder(early_config.rootpath))


class Recorder:
    """A plugin of pytest that writes which lines each test runs, in whatever fork it runs.

    Each statement is given one before it that marks its line: faster than coverage.py 7.17.
    """

    def __init__(self, root: Path) -> None:
        self._lines = {p: text.decode().split("\n") for p, text in product(root, ".py").items()}
        files = self._lines.items()
        every = dict.fromkeys(known(p, own, n + 1) for p, own in files for n in range(len(own)))
        self._numbers = {line: number for number, line in enumerate(every)}
        self._ran = builtins.__dict__["__ran__"] = bytearray(len(self._numbers))
        self._failed = False
        self._kept = root / KEPT
        self._kept.parent.mkdir(exist_ok=True)
        self._out = self._kept.with_suffix(".part").open("wb", buffering=0)
        self._out.write(json.dumps([*self._numbers]).encode() + b"\n")
        shutil.rmtree(root / "build" / "corpus", ignore_errors=True)  # tests are seen to make it

        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            path = os.path.relpath(os.path.realpath(loader.path), root)
            if path not in self._lines:
                return original(loader, name)
            return compile(self._marked(path), loader.path, "exec", dont_inherit=True)

        loader_type: Any = SourceFileLoader
        original, loader_type.get_code = SourceFileLoader.get_code, get_code

    def _marked(self, path: str) -> ast.Module:
        lines = self._lines[path]
        tree = ast.parse("\n".join(lines))
        for node in ast.walk(tree):
            bodies: list[Any] = [getattr(node, n, None) for n in ("body", "orelse", "finalbody")]
            for body in bodies:
                for statement in [*body] if isinstance(body, list) else ():
                    match statement:
                        case ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                            continue  # `from __future__` and texts stay the first
                    number = self._numbers[known(path, lines, statement.lineno)]
                    mark = ast.parse(f"__ran__[{number}] = 1").body
                    body[body.index(statement) : body.index(statement)] = mark
        return tree

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write what an everyday test ran, unless it failed: then it judges no mutant."""
        self._ran[:], self._failed, began = bytes(len(self._ran)), False, time.process_time()
        result = yield
        if item.get_closest_marker("slow") is None and not self._failed:
            ran = [mark.start() for mark in re.finditer(b"\1", self._ran)]
            seconds = round(time.process_time() - began, 2)
            self._out.write(json.dumps([item.nodeid, ran, seconds]).encode() + b"\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each part of each test."""
        self._failed |= report.failed

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep it, unless the tests were interrupted."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._kept.with_suffix(".part").rename(self._kept)
