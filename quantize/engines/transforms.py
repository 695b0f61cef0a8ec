"""Transforms that compressed-tensors declares for the inputs and outputs of linears.

Those of weights are in the stored values already. Source: `get_linear_transform_schemes` of vLLM
0.33.0; SGLang 0.5.23 does not read the key.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .contract import Question
from .name_patterns import exact_or_regex

_ONLINE = ("input", "output")


def _online(question: Question) -> Iterator[Mapping[str, Any]]:
    keys = question.declaration.keys if question.declaration else {}
    config = keys.get("transform_config")
    schemes = config.get("config_groups") if isinstance(config, Mapping) else None
    for scheme in schemes.values() if isinstance(schemes, Mapping) else ():
        for asked in scheme.get("apply", ()) if isinstance(scheme, Mapping) else ():
            if isinstance(asked, Mapping) and asked.get("location") in _ONLINE:
                yield asked


def is_transformed(question: Question, name: str) -> bool:
    """Whether what a linear of this name reads or writes is to be transformed."""
    return any(
        exact_or_regex(target, name) or target == "Linear"
        for asked in _online(question)
        for target in asked.get("targets", ())
    )


def any_transform(question: Question) -> bool:
    """Whether something is to be transformed when the draft is served."""
    return any(True for _ in _online(question))
