"""Records which lines of the product each everyday test runs, while the tests run.

`pytest -p draftquant.scripts.dev.mutants.recording` keeps them in build/mutants, as CI does.
"""

import ast
import builtins
import importlib
import importlib.machinery
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from .. import ROOT
from .reach import Lines, keep, product, write


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before any module of the product is imported."""
    folder = tempfile.TemporaryDirectory(prefix="recorded-")
    early_config.add_cleanup(folder.cleanup)
    early_config.pluginmanager.register(Recorder(ROOT, Path(folder.name)), "recorder")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what was recorded."""
    recorder: Any = session.config.pluginmanager.getplugin("recorder")
    files = {item.nodeid.partition("::")[0] for item in session.items}
    keep(ROOT, recorder.folder, ROOT / "build" / "mutants", sorted(files))


def import_product(root: Path, paths: Iterable[str]) -> None:
    """Import modules, so that what runs then is known from what tests run."""
    for path in paths:
        inside = path.removeprefix("scripts/draftquant/")
        name = inside.removesuffix(".py").replace("/", ".").removesuffix("__init__").strip(".")
        if (root / path).is_file() and not name.endswith("__main__"):
            try:
                importlib.import_module(f"draftquant.{name}".strip("."))
            except ImportError:
                continue  # it needs an engine that is not installed


class Recorder:
    """A plugin of pytest that writes which lines each test runs, in whatever fork it runs.

    Every statement of a function is given one before it that marks its line.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self.folder = root, folder
        self._product = set(product(root, ".py"))
        marks = bytearray(1 << 18)  # more than the product has statements
        self._hits = np.frombuffer(marks, np.uint8)
        self._making = np.zeros_like(self._hits)
        self._sites: list[tuple[str, int]] = []
        self._failed = False
        builtins.__dict__["__hits__"] = marks
        loader_type: Any = importlib.machinery.SourceFileLoader
        original: Callable[[Any, str], CodeType | None] = loader_type.get_code

        def get_code(loader: Any, fullname: str) -> CodeType | None:
            file = loader.get_filename(fullname)
            path = os.path.relpath(os.path.realpath(file), root)
            if path not in self._product:
                return original(loader, fullname)
            return self._marked(path, file)

        loader_type.get_code = get_code

    def _marked(self, path: str, file: str) -> CodeType:
        tree = ast.parse(Path(file).read_bytes())
        self._mark(tree, path, inside=False)
        return compile(tree, file, "exec", dont_inherit=True)

    def _mark(self, node: ast.AST, path: str, *, inside: bool) -> None:
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, value in ast.iter_fields(node):
            marked = []
            for child in value if isinstance(value, list) else ():
                if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    self._mark(child, path, inside=inside)
                text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if inside and isinstance(child, ast.stmt) and not text:
                    marked.append(self._mark_of(child, path))
                marked.append(child)
            if marked:
                setattr(node, name, marked)

    def _mark_of(self, statement: ast.stmt, path: str) -> ast.stmt:
        mark = ast.parse(f"__hits__[{len(self._sites)}] = 1").body[0]
        self._sites.append((path, statement.lineno))
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return mark

    def _lines(self, hits: npt.NDArray[np.uint8]) -> Lines:
        lines = defaultdict(set)
        for number in np.flatnonzero(hits):
            path, line = self._sites[number]
            lines[path].add(line)
        return {path: sorted(found) for path, found in lines.items()}

    def pytest_collection_finish(self) -> None:
        """What runs at import is not what tests run."""
        import_product(self._root, sorted(self._product))
        write(self.folder / "imported.json", self._lines(self._hits))
        corpus: Any = sys.modules.get("corpus")
        if corpus is not None:
            corpus.made = self._watched(corpus.made)

    def _watched(self, made: Callable[..., Path]) -> Callable[..., Path]:
        def watched(*arguments: Any) -> Path:
            before = self._hits.copy()
            self._hits[:] = 0
            try:
                return made(*arguments)
            finally:
                self._making |= self._hits
                self._hits |= before

        return watched

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write what an everyday test ran, unless it failed."""
        if item.get_closest_marker("slow") is not None:
            return (yield)
        self._failed = False
        self._hits[:] = self._making[:] = 0
        before = time.process_time()
        result = yield
        if not self._failed:
            said = {
                "test": item.nodeid,
                "seconds": round(time.process_time() - before, 3),
                "lines": self._lines(self._hits),
                "made": self._lines(self._making),
            }
            with (self.folder / f"{os.getpid()}.tests").open("a", encoding="utf-8") as out:
                out.write(json.dumps(said) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails judges no mutant."""
        self._failed |= report.failed
