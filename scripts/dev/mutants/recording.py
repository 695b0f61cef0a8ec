"""Which everyday test runs which line of the product: recorded while the tests run.

`pytest -p draftquant.scripts.dev.mutants.recording` keeps it in build/mutants.json, as CI does. It
serves later trees, too: a line that came since counts as the one above it. Delete it to see anew.
"""

import ast
import builtins
import functools
import importlib
import importlib.machinery
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from .. import ROOT

KEPT = Path("build", "mutants.json")
ROOMS = ("recipes", "quantize", "calibration", "validate", "scripts")
Lines = dict[str, list[int]]
"""Path -> the lines on which statements begin that ran."""
Record = dict[str, Lines]
"""Of a test: `lines`, and those of them that `made` folders which many tests read."""


def product(root: Path, suffix: str) -> list[str]:
    """The product's modules or tables, relative to the root; not developers' tools."""
    files = (path for room in ROOMS for path in sorted((root / room).rglob(f"*{suffix}")))
    paths = (file.relative_to(root).as_posix() for file in files)
    return [path for path in paths if not path.startswith("scripts/dev/")]


def import_product(paths: Iterable[str]) -> None:
    """Import modules, so that what runs then is known from what tests run."""
    for path in paths:
        name = path.removeprefix("scripts/draftquant/").removesuffix(".py").replace("/", ".")
        if not name.endswith("__main__"):
            try:
                importlib.import_module(f"draftquant.{name.removesuffix('__init__')}".strip("."))
            except ImportError:
                continue  # it needs an engine that is not installed


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before any module of the product is imported."""
    folder = tempfile.TemporaryDirectory(prefix="recorded-")
    early_config.add_cleanup(folder.cleanup)
    early_config.pluginmanager.register(Recorder(ROOT, Path(folder.name)), "recorder")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep what was recorded."""
    recorder: Any = config.pluginmanager.getplugin("recorder")
    keep(ROOT, recorder.folder)


class Recorder:
    """A plugin of pytest that writes which lines each test runs, in whatever fork it runs.

    Each statement is given one before it that marks it. With coverage.py 7.17 three files of tests
    took 17.7, 11.1 and 14.7 CPU seconds where they take 14.4, 6.9 and 14.7 alone.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self._paths = folder, product(root, ".py")
        marks = builtins.__dict__["__hits__"] = bytearray(1 << 18)  # more than there are statements
        self._hits = np.frombuffer(marks, np.uint8)
        self._made = np.zeros_like(self._hits)
        self._failed = False
        self._sites: list[tuple[str, int]] = []
        loader_type: Any = importlib.machinery.SourceFileLoader
        original: Callable[[Any, str], CodeType | None] = loader_type.get_code

        def get_code(loader: Any, fullname: str) -> CodeType | None:
            file = loader.get_filename(fullname)
            path = os.path.relpath(os.path.realpath(file), root)
            if path not in self._paths:
                return original(loader, fullname)
            tree = ast.parse(Path(file).read_bytes())
            for node in ast.walk(tree):
                for field, body in ast.iter_fields(node):
                    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                        setattr(node, field, [n for one in body for n in self._marked(path, one)])
            return compile(tree, file, "exec", dont_inherit=True)

        loader_type.get_code = get_code

    def _marked(self, path: str, statement: ast.stmt) -> list[ast.stmt]:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if text or isinstance(statement, ast.ImportFrom):
            return [statement]
        mark = ast.parse(f"__hits__[{len(self._sites)}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        self._sites.append((path, statement.lineno))
        return [mark, statement]

    def _write(self, test: str) -> None:
        lines: dict[str, Any] = {"lines": defaultdict(list), "made": defaultdict(list)}
        for name, hits in (("lines", self._hits), ("made", self._made)):
            for number in np.flatnonzero(hits):
                path, line = self._sites[number]
                lines[name][path].append(line)
        with (self.folder / f"{os.getpid()}.tests").open("a", encoding="utf-8") as out:
            out.write(json.dumps([test, lines]) + "\n")

    def pytest_collection_finish(self) -> None:
        """What runs at import is not what tests run."""
        import_product(self._paths)
        self._write("")
        corpus: Any = sys.modules.get("corpus")
        if corpus is not None:
            corpus.made = functools.partial(self._make, corpus.made)

    def _make(self, made: Callable[..., Path], *arguments: Any) -> Path:
        before = self._hits.copy()
        self._hits[:] = 0
        try:
            return made(*arguments)
        finally:
            self._made |= self._hits
            self._hits |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write what an everyday test ran: nothing if it failed, as then it judges no mutant."""
        self._hits[:] = self._made[:] = 0
        self._failed = False
        result = yield
        if self._failed:
            self._hits[:] = self._made[:] = 0
        if item.get_closest_marker("slow") is None:
            self._write(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each part of each test."""
        self._failed |= report.failed


def keep(root: Path, recorded: Path) -> None:
    """Keep what recorders wrote, with the sources whose lines they mean."""
    parts = [part.read_text("utf-8").splitlines() for part in recorded.glob("*.tests")]
    tests = dict(json.loads(line) for lines in parts for line in lines)
    paths = [*product(root, ".py"), *(f"tests/{p.name}" for p in root.glob("tests/test_*.py"))]
    sources = {path: (root / path).read_text("utf-8") for path in paths}
    file = root / KEPT
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"sources": sources, "tests": tests}), encoding="utf-8")
