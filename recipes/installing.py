"""What to ask pip for where a module of an extra is missing."""

import importlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .strict_json import JsonProblem, parse_object

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = "draftquant"


def imported(
    name: str, extra: str, where: object, what: str, error: Callable[..., Exception]
) -> Any:
    """A module of an extra of pyproject.toml; the error says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise error(where, what, fix=install_line(extra)) from exc


def install_line(extra: str) -> str:
    """The command that installs the packages of an extra of pyproject.toml."""
    return f"pip install {shlex.join(_packages(extra) or [_origin(extra)])}"


def install_itself() -> str:
    """The command that installs only this draftquant into another environment."""
    return f"pip install --no-deps {shlex.quote(_origin())}"


def _packages(extra: str) -> Sequence[str]:
    """Packages of an extra; empty if unknown: an editable install may be older than its clone."""
    installed = _installed()
    wanted = (installed.requires if installed else None) or ()
    parts = (requirement.partition(";") for requirement in wanted)
    return [name.strip() for name, _, marker in parts if f'extra == "{extra}"' in marker]


def _origin(extra: str = "") -> str:
    """What pip was given for draftquant (PEP 610): folder, file, address or version."""
    from urllib.parse import unquote, urlsplit

    installed = _installed()
    brackets = f"[{extra}]" if extra else ""
    if installed is None:
        return f"CLONE{brackets}"
    try:
        direct_url = parse_object(installed.read_text("direct_url.json") or "{}")
    except JsonProblem:
        direct_url = {}
    url = direct_url.get("url")
    if not isinstance(url, str):
        return f"{_NAME}{brackets}=={installed.version}"
    address = urlsplit(url)
    if address.scheme == "file":
        path = Path(unquote(address.path))
        return f"{path if path.exists() else path.name}{brackets}"
    of_git = direct_url.get("vcs_info")
    if isinstance(of_git, dict):
        url = f"{of_git.get('vcs')}+{url}@{of_git.get('commit_id')}"
    return f"{_NAME}{brackets} @ {url}"


def _installed() -> "Distribution | None":
    from importlib.metadata import PackageNotFoundError, distribution  # for a fix only

    try:
        return distribution(_NAME)
    except PackageNotFoundError:
        return None
