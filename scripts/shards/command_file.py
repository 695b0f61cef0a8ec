"""Several command lines in one file: one to a line, quoted as a shell quotes."""

import shlex
from pathlib import Path

from ...recipes.regular_file import read_text
from .parts import ShardError


def read_commands(path: Path) -> tuple[tuple[str, ...], ...]:
    """The words of each line; what stands behind a # is a comment.

    Raises:
        ShardError: it cannot be read, or holds no command, or one twice.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ShardError(path, f"cannot be read: {exc}", fix="give a text file") from exc
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as exc:
            raise ShardError(f"{path}:{number}", str(exc), fix="close the quotation") from exc
        words = words[1:] if words[:1] == ("draftquant",) else words
        if words in found:
            what = f"is the command of line {found[words]} again"
            raise ShardError(f"{path}:{number}", what, fix="remove one of them")
        if words:
            found[words] = number
    if not found:
        raise ShardError(path, "holds no command", fix="gate A B --traces T --report R.json")
    return tuple(found)
