"""Regular expressions of a declaration, held against names of modules."""

from ...errors import VerifyError
from ..patterns import PatternProblem, matches, understood
from .reader import ObjectReader, not_understood
from .scheme import DeclaredScheme


def is_regex_match(pattern: str, module: str) -> bool:
    """True if an exclude `re:...` matches from the start of a module's name.

    Raises:
        VerifyError: it is not understood, or not decided for this name.
    """
    try:
        return matches(pattern.removeprefix("re:"), module)
    except PatternProblem as exc:
        raise _no_pattern("the excludes", module, pattern, exc) from exc


def check_patterns(keys: ObjectReader, scheme: DeclaredScheme) -> None:
    """Every `re:` pattern of excludes and targets is understood.

    Raises:
        VerifyError: one is not.
    """
    targets = (target for each in (scheme, *scheme.others) for target in each.targets)
    for pattern in (*scheme.excludes, *targets):
        if pattern.startswith("re:"):
            try:
                understood(pattern[3:])
            except PatternProblem as exc:
                raise _no_pattern(keys.where, keys.key, pattern, exc) from exc


def _no_pattern(where: object, key: str, pattern: str, exc: PatternProblem) -> VerifyError:
    return not_understood(where, key, (f"a regular expression ({exc})",), pattern)
