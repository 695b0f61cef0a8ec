"""Ways in which engines match an exclude with a module's name; each engine says which it uses."""

import fnmatch
import re

from .contract import UnsureError


def is_regex_match(pattern: str, name: str) -> bool:
    """True if a pattern `re:...` matches from the start of the name.

    Raises:
        UnsureError: it is no regular expression; when an engine notices depends on the engine.
    """
    if not pattern.startswith("re:"):
        return False
    try:
        return re.match(pattern[3:], name) is not None
    except re.error as exc:
        raise UnsureError(f"the exclude {pattern!r} is no regular expression: {exc}") from exc


def exact_or_regex(pattern: str, name: str) -> bool:
    """The whole name, or `re:` from its start."""
    return pattern == name or is_regex_match(pattern, name)


def suffix_or_regex(pattern: str, name: str) -> bool:
    """The whole name, its last dotted parts, or `re:` from its start."""
    return exact_or_regex(pattern, name) or (
        not pattern.startswith("re:") and name.endswith("." + pattern)
    )


def substring_or_wildcard(pattern: str, name: str) -> bool:
    """Any piece of the name, or a shell wildcard for all of it."""
    return pattern in name or fnmatch.fnmatch(name, pattern)


def dotted_path(pattern: str, name: str) -> bool:
    """Whole dotted parts anywhere in the name."""
    return f".{pattern.rstrip('.')}." in f".{name.rstrip('.')}."


def star_on_parts(pattern: str, name: str) -> bool:
    """`*` in the whole name or in one dotted part; everything else is a regular expression.

    Raises:
        UnsureError: that is no regular expression.
    """
    try:
        compiled = re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
    except re.error as exc:
        raise UnsureError(f"the exclude {pattern!r} is no regular expression: {exc}") from exc
    return any(compiled.fullmatch(text) for text in (name, *name.split(".")))
