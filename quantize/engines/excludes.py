"""Ways in which engines match an exclude with a module's name; each engine says which it uses."""

import fnmatch

from ...recipes.errors import short
from ..stored.patterns import PatternProblem, matches
from .contract import UnsureError


def is_regex_match(pattern: str, name: str) -> bool:
    """True if a pattern `re:...` matches from the start of the name.

    Raises:
        UnsureError: it is no regular expression; when an engine notices depends on the engine. Or
            it is one that is not understood here.
    """
    return pattern.startswith("re:") and _matches(pattern, pattern[3:], name)


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
        UnsureError: that is no regular expression, or one that is not understood here.
    """
    expression = pattern.replace(".", r"\.").replace("*", ".*")
    names = (name, *name.split("."))
    return any(_matches(pattern, expression, text, whole=True) for text in names)


def _matches(pattern: str, expression: str, name: str, *, whole: bool = False) -> bool:
    try:
        return matches(expression, name, whole=whole)
    except PatternProblem as exc:
        what = f"the exclude {short(pattern)} is no regular expression that is understood: {exc}"
        raise UnsureError(what) from exc
