"""Results that are kept between runs, one file each; none with a changed byte is used.

An entry repeats the whole key that it answers, and has an authentication code over key and result
(HMAC-SHA256) with a secret that only the user can read: an entry that was edited, cut, renamed
or written by somebody else is refused, with a warning, and made again. No run depends on the cache.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.brief import megabytes
from ...recipes.errors import OutputError, reason, short
from ...recipes.regular_file import open_regular, open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_object
from .staging import CleanReport, write_text

FOLDER_VARIABLE = "DRAFTQUANT_CACHE"
MAX_BYTES = 2**30
"""Limit of all entries; the least recently used go first."""

_LARGEST = 2**28  # bytes of one entry
_ANY_FORMAT = b"draftquant cache "
_FORMAT = _ANY_FORMAT + b"1"
_ENDING, _NEW, _SECRET = ".entry", ".new-", "secret"
_SECRET_BYTES = 32
_NAMES = re.compile(rf"[0-9a-f]{{64}}\{_ENDING}|{_NEW}\w{{8}}|{_SECRET}")
"""Names of a cache's files: sha256 of a key, what `mkstemp` began, and the secret."""
_ABANDONED = 3600.0  # seconds after which an unfinished file belongs to nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCache:
    """A folder of results, created when the first one is kept, for this user only."""

    folder: Path
    on_warning: Callable[[str], None]
    max_bytes: int = MAX_BYTES

    def read(self, key: Mapping[str, object]) -> bytes | None:
        """What was kept under a key; None = nothing, or nothing trustworthy."""
        text, path = _text(key), self._path(key)
        try:
            with open_stream(path) as stream:
                content = stream.read(_LARGEST + 1)
            secret = self._secret()
        except FileNotFoundError:
            return None
        except OSError as exc:
            self.on_warning(f"the cache is not used: {exc.filename or path}: {reason(exc)}")
            return None
        head, code, question, result = (*content.split(b"\n", 3), b"", b"", b"")[:4]
        if head != _FORMAT:
            self.refuse(key, "it is no entry of this version")
        elif not hmac.compare_digest(code, _code(secret, question, result)):
            self.refuse(key, "it was edited, cut short, or written by somebody else")
        elif question != text:
            self.refuse(key, "it answers another question than its name says")
        else:
            with contextlib.suppress(OSError):  # where nothing can be written, nothing is removed
                os.utime(path)  # it was used: others go first
            return result
        return None

    def write(self, key: Mapping[str, object], result: bytes) -> None:
        """Keep a result; concurrent readers see the whole entry or none."""
        text, path = _text(key), self._path(key)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            code = _code(self._secret(), text, result)
            self._put(path, b"\n".join((_FORMAT, code, text, result)))
            self._make_room(path)
        except OSError as exc:
            why = f"{exc.filename or path}: {reason(exc)}"
            self.on_warning(f"the result is not kept in the cache: {why}")

    def refuse(self, key: Mapping[str, object], why: str) -> None:
        """Warn of the entry under a key; a new result will replace it."""
        self.on_warning(f"{self._path(key)}: this entry of the cache is refused: {why}")

    def clean(self) -> CleanReport:
        """Remove every entry and the secret, and the folder unless it holds something else."""
        name, removed = str(self.folder), 0
        try:
            for path, status in self._files():
                path.unlink(missing_ok=True)
                removed += status.st_size
        except OSError as exc:
            return CleanReport(removed={}, left={name: f"cannot be removed: {reason(exc)}"})
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return CleanReport(removed={name: removed} if removed else {}, left={})

    def listed(self) -> CleanReport:
        """The entries of the cache, none of which is removed."""
        sizes = [status.st_size for path, status in self._files() if path.suffix == _ENDING]
        why = f"the cache of replays, {megabytes(sum(sizes))}, which clean --cache removes"
        return CleanReport(removed={}, left={str(self.folder): why} if sizes else {})

    def _path(self, key: Mapping[str, object]) -> Path:
        return self.folder / f"{hashlib.sha256(_text(key)).hexdigest()}{_ENDING}"

    def _secret(self) -> bytes:
        """The user's secret, made by the first run; an OSError where others can read it."""
        path = self.folder / _SECRET
        if not path.exists():
            self._put(path, secrets.token_bytes(_SECRET_BYTES), keep=True)
        with open_stream(path) as stream:
            status = os.fstat(stream.fileno())
            secret = stream.read(_SECRET_BYTES)
        others_read = status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077
        if others_read or len(secret) < _SECRET_BYTES:
            what = f"expected {_SECRET_BYTES} bytes in a file that only you can read"
            raise OSError(errno.EPERM, what, path)
        return secret

    def _put(self, path: Path, content: bytes, *, keep: bool = False) -> None:
        """Write a file whole, readable only by the user; `keep` = an existing file stays."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=_NEW)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            if keep:
                with contextlib.suppress(FileExistsError):  # another run was faster
                    os.link(name, path)
            else:
                Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _make_room(self, newest: Path) -> None:
        files = sorted(self._files(), key=lambda file: file[1].st_mtime)
        total = sum(status.st_size for path, status in files if path.suffix == _ENDING)
        for path, status in files:
            if path.name.startswith(_NEW) and time.time() - status.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
            elif path.suffix == _ENDING and path != newest and total > self.max_bytes:
                path.unlink(missing_ok=True)
                total -= status.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The cache's own files, as far as they still exist."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG((status := path.lstat()).st_mode) and _is_own(path, status):
                    yield path, status


def user_cache(on_warning: Callable[[str], None]) -> ResultCache | None:
    """The cache of this user; None where DRAFTQUANT_CACHE is empty.

    It is in DRAFTQUANT_CACHE, or in `draftquant` of XDG_CACHE_HOME, or in ~/.cache.
    Source: XDG Base Directory Specification 0.8, which ignores relative paths.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return ResultCache(folder=Path(named), on_warning=on_warning) if named else None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError as exc:
            on_warning(f"there is no cache, unless {FOLDER_VARIABLE} names a folder: {exc}")
            return None
    return ResultCache(folder=base / "draftquant", on_warning=on_warning)


def _is_own(path: Path, status: os.stat_result) -> bool:
    """Whether a cache wrote a file: the folder may hold other files with similar names."""
    if not _NAMES.fullmatch(path.name):
        return False
    if path.suffix != _ENDING:
        return path.name != _SECRET or status.st_size == _SECRET_BYTES
    with open_stream(path) as stream:
        return stream.read(len(_ANY_FORMAT)) == _ANY_FORMAT


def _text(key: Mapping[str, object]) -> bytes:
    return json.dumps(key, sort_keys=True).encode()


def _code(secret: bytes, key: bytes, result: bytes) -> bytes:
    code = hmac.new(secret, b"%s\n%s\n" % (_FORMAT, key), "sha256")
    code.update(result)
    return code.hexdigest().encode()


# Long work keeps what is done in a folder beside its output, with one JSON file that says what
# the work is; a different command is refused.


@contextmanager
def resumable_folder(folder: Path, work: str, plan: Mapping[str, Any]) -> Iterator[None]:
    """Begin work, or resume the same plan, with exclusive use of the folder."""
    path = folder / f"{work}.json"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"{path.name}.{os.getpid()}"  # nobody has the folder yet
        write_text(unfinished, json.dumps(plan, indent=1) + "\n")
        unfinished.rename(path)
    descriptor = open_regular(path)
    try:
        take_alone(path, descriptor, folder, work)
        try:
            begun = parse_object(read_text(path))
        except (OSError, JsonProblem) as exc:
            raise OutputError(path, f"it is not an unfinished {work}: {exc}",
                              fix=f"rm -r {folder}") from exc  # fmt: skip
        refuse_other_work(folder, work, differences(begun, plan), remove=f"rm -r {folder}")
        yield
    finally:
        os.close(descriptor)


def take_alone(path: Path, descriptor: int, where: Path, work: str) -> None:
    """Lock an open file, unless another run has it, or has just finished and removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        is_there = False
    if not is_there:
        fix = "wait until it is done, or give another --out"
        raise OutputError(where, f"another process is {work} there", fix=fix)


def differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """How the work that was begun differs from the work now, one line per key."""
    return tuple(
        f"  {key}: it was {short(begun.get(key))}, now it is {short(now.get(key))}"
        for key in sorted(begun.keys() | now.keys())
        if begun.get(key) != now.get(key)
    )


def refuse_other_work(
    where: Path, work: str, differing: Sequence[str], *, given: str = "arguments", remove: str
) -> None:
    """Resume only equal work; `remove` is the command that removes what is kept."""
    if differing:
        what = f"it holds an unfinished {work} with other settings, of which results are kept"
        fix = f"give the same {given} again, another --out, or {remove}"
        raise OutputError(where, what, details=differing, fix=fix)


def write_whole(path: Path, text: str) -> None:
    """Write a file that gets its name when it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write_text(unfinished, text)
    unfinished.rename(path)
