"""Which group of a declaration a module belongs to.

Source: `find_matched_target` of compressed-tensors' configs in vLLM 0.33.0 and SGLang 0.5.23; other
declarations have one group.
"""

from ..stored.layouts.scheme import EVERY_LINEAR
from .contract import Engine, Module, Question
from .dspark import MARKOV
from .excludes import exact_or_regex
from .linear_scheme import LinearScheme

_HEADS = ("lm_head", MARKOV.leaf)
NAMED_HEADS = frozenset({"compressed-tensors"})
"""Each quant_method whose heads are quantized only where a target names them.

vLLM's ParallelLMHead has no "Linear" in its name (`utils.py:73`), SGLang asks no class for it
(`get_lm_head_scheme`).
"""


def scheme_of(engine: Engine, question: Question, module: Module) -> LinearScheme | None:
    """How a module is stored if it is not excluded; None where no group is meant for it.

    Names decide before classes, all of which are called something with "Linear".

    Raises:
        UnsureError: a target is no regular expression that is understood.
    """
    groups = question.declaration.groups if question.declaration else ()
    on_disk = (question.method, question.family) in engine.targets_on_disk
    for group in groups:
        if on_disk and set(module.parts) <= set(group.targets):
            return group.scheme
        if any(exact_or_regex(target, module.prefix) for target in group.targets):
            return group.scheme
    if module.leaf in _HEADS and question.method in NAMED_HEADS:
        return None
    every = (group.scheme for group in groups if set(EVERY_LINEAR) & set(group.targets))
    return next(every, None)
