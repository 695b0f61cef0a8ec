"""How excludes and targets of a declaration are matched with the names of modules.

Each engine says which way of excluding it uses. Source of targets: `find_matched_target` of
compressed-tensors' configs in vLLM 0.33.0 and SGLang 0.5.23; other declarations have one group.
"""

from collections.abc import Callable, Collection, Iterable

from ...recipes.errors import short
from ..stored.layouts.module_patterns import PatternProblem, matches
from ..stored.layouts.scheme import EVERY_LINEAR
from .contract import Module, Question, UnsureError
from .declared_forms import LinearScheme

Patterns = tuple[str, ...]
Matching = Callable[[str, str], bool]
"""Whether a pattern matches a name."""
QUANTIZED_HEADS = ("modelopt", "compressed-tensors")
"""Each quant_method that can quantize heads: `compressed_tensors.py:186`, `modelopt.py:254` of
vLLM, `compressed_tensors.py:202`, `modelopt_quant.py:341` of SGLang."""
BY_NAME = frozenset({"compressed-tensors"})
"""Each quant_method that takes heads and experts only by their own names, and one kind of experts.

vLLM's ParallelLMHead has no "Linear" in its name (`utils.py:73`), SGLang asks no class for it
(`get_lm_head_scheme`); `get_moe_scheme` of SGLang's `compressed_tensors.py:878`, as in vLLM.
"""


def exact_or_regex(pattern: str, name: str) -> bool:
    """The whole name, or a `re:` pattern from its start.

    Raises:
        UnsureError: it is not a regular expression, or not one that is understood here; when an
            engine notices depends on the engine.
    """
    return pattern == name or (pattern.startswith("re:") and _matches(pattern, pattern[3:], name))


def suffix_or_regex(pattern: str, name: str) -> bool:
    """The whole name, its last dotted parts, or a `re:` pattern from its start."""
    return exact_or_regex(pattern, name) or (
        not pattern.startswith("re:") and name.endswith("." + pattern)
    )


def dotted_path(pattern: str, name: str) -> bool:
    """Whole dotted parts anywhere in the name."""
    return f".{pattern.rstrip('.')}." in f".{name.rstrip('.')}."


def star_on_parts(pattern: str, name: str) -> bool:
    """`*` in the whole name or in one dotted part; others are expressions, or UnsureErrors."""
    expression = pattern.replace(".", r"\.").replace("*", ".*")
    names = (name, *name.split("."))
    return any(_matches(pattern, expression, text, whole=True) for text in names)


def whole_or_parts(
    matched: Matching, patterns: Collection[str], module: Module, parts: Iterable[str]
) -> bool:
    """By the name of a module, or else by those of all its parts; UnsureError for some of them."""
    if any(matched(pattern, module.prefix) for pattern in patterns):
        return True
    return by_parts(matched, patterns, module, parts)


def by_parts(
    matched: Matching, patterns: Collection[str], module: Module, parts: Iterable[str]
) -> bool:
    """By these names; UnsureError where some of them are excluded, which engines refuse."""
    answers = {any(matched(pattern, name) for pattern in patterns) for name in parts}
    if len(answers) > 1:
        raise UnsureError(f"Some parts of {module.prefix} are excluded, which is fused, not all")
    return answers == {True}


def _matches(pattern: str, expression: str, name: str, *, whole: bool = False) -> bool:
    try:
        return matches(expression, name, whole=whole)
    except PatternProblem as exc:
        what = f"The exclude {short(pattern)} is no regular expression that is understood: {exc}"
        raise UnsureError(what) from exc


def scheme_of(question: Question, module: Module) -> LinearScheme | None:
    """How a module is stored if it is not excluded; None where no group covers it.

    Names decide before classes, whose names all contain "Linear". A target that is
    not an expression is an UnsureError.
    """
    groups = question.declaration.groups if question.declaration else ()
    on_disk = question.method in question.own.targets_on_disk

    def named(name: str, *parts: str) -> LinearScheme | None:
        for group in groups:
            if on_disk and parts and set(parts) <= set(group.stored.targets):
                return group
            if any(exact_or_regex(target, name) for target in group.stored.targets):
                return group
        return None

    if (own := named(module.prefix, *module.parts)) is not None:
        return own
    if is_head(question, module.leaf) and question.method in BY_NAME:
        return None
    every = next((group for group in groups if set(EVERY_LINEAR) & set(group.stored.targets)), None)
    if every is not None and question.own.classes_first:
        return every
    parts = [named(name) for name in question.names_of_parts(module)]
    return parts[0] if parts and all(parts) else every


def is_head(question: Question, leaf: str) -> bool:
    """Whether a module is a head, the draft's or another one that is built like one."""
    return leaf == "lm_head" or leaf in extra_heads(question)


def extra_heads(question: Question) -> frozenset[str]:
    """Leaves of the linears besides the head that are built like one."""
    return frozenset(linear.leaf for linear in question.traits.extra_linears if linear.is_head)
