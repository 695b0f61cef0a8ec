"""Importing AMD Quark: what it wants of the machine and of the process.

It needs `ninja` at every import and a C++ compiler at the first one, which builds an extension. It
reads environment variables while it is imported, and writes a log to stderr.

torch guards that build by a file, `lock`, and waits for ever where a process was killed before it
removed its own. Ours is built in a folder of its own under a lock of the kernel's, which ends with
its process: a `lock` found there belongs to nobody.

While it is imported, Quark parses all models of transformers, in search of one decorator.
"""

import ast
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import BackendError
from .vendor import process_state

EXTENSION = "quark_hw_emulation_stable_abi"
_SOUGHT = "use_experts_implementation"


def require_build_tools() -> None:
    """Fail unless `ninja` is there, and a C++ compiler where the extension is still to be built.

    Raises:
        BackendError: one of them is missing.
    """
    _path_with_ninja()
    compiler = os.environ.get("CXX", "c++")
    built = extension_folder() / EXTENSION / f"{EXTENSION}.so"
    if not built.exists() and not shutil.which(compiler):
        raise BackendError(
            "backend quark",
            f"AMD Quark builds a C++ extension at its first import: no compiler {compiler!r} found",
            fix="install g++ (or set CXX), or use --backend torch (in a recipe: 'backend: torch')",
        )


def extension_folder() -> Path:
    """Where the extension is built: by this Python and torch, for no program but this one."""
    # Not at the top: it imports setuptools, which no other backend needs.
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(root) / f"draftquant-python{python}-torch{torch.__version__}"


@contextlib.contextmanager
def quark_process_state() -> Iterator[None]:
    """Quark imported, in a process as it needs it, put back afterwards; nothing of it on stdout.

    Raises:
        BackendError: a build tool is missing, or the extension's folder cannot be made.
        ImportError: Quark cannot be imported.
    """
    require_build_tools()
    folder = extension_folder()
    # QUARK_DISABLE_COMPILE is read at import: with torch.compile the same bits take 15 s longer.
    with process_state(
        PATH=_path_with_ninja(), QUARK_DISABLE_COMPILE="1", TORCH_EXTENSIONS_DIR=str(folder)
    ):
        # Warnings stay: they say why the extension was not built. Not by Quark's own switch, which
        # walks every logger of the process, 30 ms each time.
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.INFO))
        try:
            if "quark.torch" not in sys.modules:
                with _alone_in(folder), _parsing_what_names_experts():
                    import quark.torch  # noqa: F401
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def _parsing_what_names_experts() -> Iterator[None]:
    """Quark's search gets an empty tree for a file without the decorator's name, as for most.

    To parse them all takes 8 s, two thirds of the import. What it finds is the same.
    """
    parse = ast.parse

    def parse_less(source: Any, *more: Any, **named: Any) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.endswith(".quark_experts") and _SOUGHT not in source:
            return ast.Module(body=[], type_ignores=[])
        return parse(source, *more, **named)

    ast.parse = parse_less
    try:
        yield
    finally:
        ast.parse = parse


def _path_with_ninja() -> str:
    """PATH on which `ninja` is found: Quark misses the one of a venv that is not activated."""
    path = os.environ.get("PATH", "")
    if shutil.which("ninja"):
        return path
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts):
        return os.pathsep.join((scripts, path))
    raise BackendError(
        "backend quark",
        f"AMD Quark needs 'ninja' at every import: not found on PATH, nor in {scripts}",
        fix="pip install ninja, or use --backend torch (in a recipe: 'backend: torch')",
    )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for who has it, and remove what a killed process left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise BackendError(
            f"backend quark, folder {folder}",
            f"AMD Quark's extension cannot be built there: {exc.strerror}",
            fix="set TORCH_EXTENSIONS_DIR to a folder that can be written, or use --backend"
            " torch (in a recipe: 'backend: torch')",
        ) from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (folder / EXTENSION / "lock").unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
