"""Transforms that compressed-tensors declares for the inputs and outputs of linears.

Those of weights are in the stored values already. Source: `get_linear_transform_schemes` of vLLM
0.33.0; SGLang 0.5.23 does not read the key.
"""

from collections.abc import Iterator, Mapping

from .contract import Question
from .name_patterns import exact_or_regex

_ONLINE = ("input", "output")


def _online(question: Question) -> Iterator[str]:
    """Targets of those that are applied when the draft is served."""
    keys = question.declaration.keys if question.declaration else {}
    for scheme in _object(_object(keys.get("transform_config")).get("config_groups")).values():
        for asked in map(_object, _list(_object(scheme).get("apply"))):
            if asked.get("location") in _ONLINE:
                yield from (each for each in _list(asked.get("targets")) if isinstance(each, str))


def _object(value: object) -> Mapping[str, object]:
    """A section, of any JSON type, as an object."""
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def is_transformed(question: Question, name: str) -> bool:
    """Whether what a linear of this name reads or writes is to be transformed."""
    return any(exact_or_regex(each, name) or each == "Linear" for each in _online(question))


def any_transform(question: Question) -> bool:
    """Whether something is to be transformed when the draft is served."""
    return any(True for _ in _online(question))
