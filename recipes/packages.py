"""Packages: names imported on first use (PEP 562), tables beside modules, versions."""

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module that is imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_names(module: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a module: the names that it imports only for type checkers."""
    package = sys.modules[module]
    home_of = {
        alias.name: f"{'.' * node.level}{node.module}"
        for block in ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def imported(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name], package.__package__), name)
        setattr(package, name, value)
        return value

    return [*home_of], imported


def table_beside(module: str, name: str = "") -> dict[str, Any]:
    """The rows, in TOML, beside a module (its `__file__`), under its own name or another."""
    import tomllib

    path = Path(module).with_suffix(".toml")
    return tomllib.loads((path.with_stem(name) if name else path).read_text(encoding="utf-8"))


@functools.cache
def rows_beside(module: str, table: str) -> Mapping[str, Any]:
    """The same, read once."""
    return table_beside(module, table)


def package_version(name: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
