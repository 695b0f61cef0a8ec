"""Groups of prompts that nobody declared, but that their ids or categories suggest.

Prompts of one document, task or user have more in common than others, and say less than they count:
in groups of five that share an effect, 5 % of false passes become 11 %.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_TURN = re.compile(r"/turn-\d+$")
_NUMBERED = re.compile(r"(.+?)[-_/.:# ]\d+$")
"""doc1-2, boolq/17: a name, and a number within it."""
_DIGITS = re.compile(r"\d+")
_LEAST_GROUPS = 3


def suggested_clusters(prompts: Sequence[tuple[str, str]]) -> str:
    """What a reader should know of prompts without a declared cluster.

    Ids suggest groups where, without the number at their end, there are three names or more for
    twice as many prompts or more, and not one for each category; categories where three or more
    differ in a number only.

    Returns:
        Whole sentences; empty if nothing is suggested.
    """
    named = {prompt_id: category for prompt_id, category in prompts if not _TURN.search(prompt_id)}
    stems = {prompt_id: _stem(prompt_id) for prompt_id in named}
    by_category = Counter((named[prompt_id], stem) for prompt_id, stem in stems.items())
    finer = len({category for category, _ in by_category}) < len(by_category)
    if finer and _are_groups(stems.values()):
        return _sentence("ids", sorted(set(stems.values())))
    categories = [_DIGITS.sub("#", category) for category in set(named.values())]
    numbered = {form for form, count in Counter(categories).items() if count >= _LEAST_GROUPS}
    within = [c for c in named.values() if _DIGITS.sub("#", c) in numbered and _DIGITS.search(c)]
    if _are_groups(within):
        return _sentence("categories", sorted(set(within)))
    return ""


def _stem(prompt_id: str) -> str:
    found = _NUMBERED.fullmatch(prompt_id)
    return found[1] if found else prompt_id


def _are_groups(found: Iterable[str]) -> bool:
    names = list(found)
    return _LEAST_GROUPS <= len(set(names)) <= len(names) / 2


def _sentence(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"The {what} look like {len(names)} groups ({shown}). If prompts of a group share a"
        ' document, a task or a user, declare it as "cluster" in the prompt file: undeclared, the'
        " bounds are too narrow."
    )
