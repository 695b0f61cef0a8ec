"""Packages: names imported when asked for (PEP 562), versions, and what pip is asked for."""

import functools
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = "draftquant"


class LazyModule(ModuleType):
    """A module that is imported when something of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__`, and the `__getattr__` for names with other homes: module -> its names."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return [*home_of], found


def table_beside(module: str, name: str = "") -> dict[str, Any]:
    """The rows, in TOML, beside a module of ours (its `__file__`), under its name or another."""
    import tomllib

    path = Path(module).with_suffix(".toml")
    return tomllib.loads((path.with_stem(name) if name else path).read_text(encoding="utf-8"))


@functools.cache
def _texts(module: str, table: str) -> Mapping[str, Mapping[str, str]]:
    return table_beside(module, table)


def said(module: str, table: str, row: str, facts: Mapping[str, object]) -> dict[str, str]:
    """A row of texts of a table beside a module, with facts in the places that name them."""
    texts = _texts(module, table)[row].items()
    return {key: text.format_map(facts) for key, text in texts}


def package_version(name: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def imported(
    name: str, extra: str, where: object, what: str, error: Callable[..., Exception]
) -> Any:
    """A module of an extra of pyproject.toml; an error says how it is installed."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise error(where, what, fix=install_line(extra)) from exc


def install_line(extra: str) -> str:
    """The command that installs the packages of an extra of pyproject.toml."""
    return f"pip install {shlex.join(_packages(extra) or [_origin(extra)])}"


def install_itself() -> str:
    """The command that installs this draftquant alone into another environment."""
    return f"pip install --no-deps {shlex.quote(_origin())}"


def _packages(extra: str) -> Sequence[str]:
    """Empty where they are not known: an editable installation may be older than its clone."""
    found = _installed()
    wanted = (found.requires if found else None) or ()
    parts = (one.partition(";") for one in wanted)
    return [name.strip() for name, _, marker in parts if f'extra == "{extra}"' in marker]


def _origin(extra: str = "") -> str:
    """What pip was given for draftquant (PEP 610), folder, file, address or version."""
    from urllib.parse import unquote, urlsplit

    from .strict_json import JsonProblem, parse_object

    found = _installed()
    brackets = f"[{extra}]" if extra else ""
    if found is None:
        return f"CLONE{brackets}"
    try:
        said = parse_object(found.read_text("direct_url.json") or "{}")
    except JsonProblem:
        said = {}
    url = said.get("url")
    if not isinstance(url, str):
        return f"{_NAME}{brackets}=={found.version}"
    address = urlsplit(url)
    if address.scheme == "file":
        path = Path(unquote(address.path))
        return f"{path if path.exists() else path.name}{brackets}"
    of_git = said.get("vcs_info")
    if isinstance(of_git, dict):
        url = f"{of_git.get('vcs')}+{url}@{of_git.get('commit_id')}"
    return f"{_NAME}{brackets} @ {url}"


def _installed() -> "Distribution | None":
    from importlib.metadata import PackageNotFoundError, distribution  # for a fix alone

    try:
        return distribution(_NAME)
    except PackageNotFoundError:
        return None
