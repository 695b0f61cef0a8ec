"""How excludes and targets of a declaration are matched with the names of modules.

Each engine says which way of excluding it uses. Source of targets: `find_matched_target` of
compressed-tensors' configs in vLLM 0.33.0 and SGLang 0.5.23; other declarations have one group.
"""

import fnmatch

from ...recipes.errors import short
from ..stored.layouts.scheme import EVERY_LINEAR
from ..stored.patterns import PatternProblem, matches
from .contract import Module, Question, UnsureError
from .linear_scheme import LinearScheme

NAMED_HEADS = frozenset({"compressed-tensors"})
"""Each quant_method whose heads are quantized only where a target names them.

vLLM's ParallelLMHead has no "Linear" in its name (`utils.py:73`), SGLang asks no class for it
(`get_lm_head_scheme`).
"""


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
        what = f"The exclude {short(pattern)} is no regular expression that is understood: {exc}"
        raise UnsureError(what) from exc


def scheme_of(question: Question, module: Module) -> LinearScheme | None:
    """How a module is stored if it is not excluded; None where no group is meant for it.

    Names decide before classes, all of which are called something with "Linear".

    Raises:
        UnsureError: a target is no regular expression that is understood.
    """
    groups = question.declaration.groups if question.declaration else ()
    on_disk = question.method in question.own.targets_on_disk
    for group in groups:
        if on_disk and set(module.parts) <= set(group.targets):
            return group.scheme
        if any(exact_or_regex(target, module.prefix) for target in group.targets):
            return group.scheme
    if is_head(question, module.leaf) and question.method in NAMED_HEADS:
        return None
    every = (group.scheme for group in groups if set(EVERY_LINEAR) & set(group.targets))
    return next(every, None)


def is_head(question: Question, leaf: str) -> bool:
    """Whether a module is a head, the draft's or another one that is built as such."""
    return leaf == "lm_head" or leaf in extra_heads(question)


def extra_heads(question: Question) -> frozenset[str]:
    """Leaves of the linears beside the head that are built as one."""
    return frozenset(linear.leaf for linear in question.traits.extra_linears if linear.is_head)
