"""Which linears GPTQ and AutoRound leave as floats: their declarations say it in keys of their own.

Sources: `gptq_utils.py` and `inc/config_parser.py` of vLLM 0.33.0, `quantization/utils.py` and
`auto_round.py` of SGLang 0.5.23; executed (`tests/engines/kinds.py`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from ..stored.parts import WORDS_OF_CODES
from .contract import Module, Question, UnsureError
from .name_patterns import SOME_PARTS, is_regex_match, one_answer

Patterns = tuple[str, ...]
_FOR_REGEX = frozenset("*+?^$()[]{}|\\")
"""A key of extra_config with one of these is a regular expression."""


def gptq_by_rules(question: Question, module: Module, _patterns: Patterns) -> bool:
    """`dynamic`: the first regular expression that matches from the start decides; "-:" keeps."""
    rules: Iterable[str] = _keys(question).get("dynamic") or {}
    for rule in rules:
        is_kept: bool = rule.startswith("-:")
        if is_regex_match(f"re:{rule.removeprefix('-:' if is_kept else '+:')}", module.prefix):
            return is_kept
    return False


def gptq_by_lists(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    """And what no name in `modules_in_block_to_quantize` is a part of.

    Without the key vLLM lists the modules that have codes, by their names on disk, which are those
    of the runtime for whole models alone.
    """
    if gptq_by_rules(question, module, patterns):
        return True
    said = _keys(question).get("modules_in_block_to_quantize")
    given = _flat(said or [])
    if said and not given:
        return False  # lists without a name
    listed = given or [
        name.rpartition(".")[0] for name in question.tensor_names if name.endswith(WORDS_OF_CODES)
    ]
    found = {any(name in each for name in listed) for each in _unfused(question, module)}
    return one_answer({not each for each in found}, module, SOME_PARTS)


def auto_round_in_vllm(question: Question, module: Module, _patterns: Patterns) -> bool | Finding:
    """`extra_config` by the whole name, its end or a part, then `block_name_to_quantize`."""
    own, prefix = _floats(question), module.prefix
    if any(prefix == key or key == f"model.{prefix}" or prefix.endswith(f".{key}") for key in own):
        return True
    unfused = _unfused(question, module)
    found = {key in own or _matched(own, key, anywhere=True) for key in unfused}
    if len(unfused) > 1 and True in found:
        return one_answer(found, module, "Fused module '{}' requires consistent quant config")
    return _matched(own, prefix, anywhere=True) or not _in_blocks(question, prefix)


def auto_round_in_sglang(question: Question, module: Module, _patterns: Patterns) -> bool | Finding:
    """As vLLM, but for ends of names and parts of fused linears."""
    own, prefix = _floats(question), module.prefix
    named = prefix in own or _matched(own, prefix, anywhere=False)
    return named or not _in_blocks(question, prefix)


def _keys(question: Question) -> Mapping[str, Any]:
    if question.declaration is None:
        raise UnsureError(f"Loading such a draft in {question.method} was never executed")
    return question.declaration.keys


def _floats(question: Question) -> Patterns:
    """Names and expressions of `extra_config` whose linears stay floats; others have a group."""
    own = _keys(question).get("extra_config") or {}
    return tuple(name for name, said in own.items() if said.get("bits", 0) >= 16)


def _unfused(question: Question, module: Module) -> tuple[str, ...]:
    """Names that a linear goes by: its own, or those of its parts."""
    return question.names_of_parts(module) or (module.prefix,)


def _matched(own: Iterable[str], name: str, *, anywhere: bool) -> bool:
    wanted = "re:.*(?:{})" if anywhere else "re:(?:{})$"
    expressions = [key for key in own if _FOR_REGEX & set(key)]
    return any(is_regex_match(wanted.format(key), name) for key in expressions)


def _in_blocks(question: Question, prefix: str) -> bool:
    """Without the key everything is."""
    keys = _keys(question)
    said = keys.get("block_name_to_quantize") or keys.get("to_quant_block_names") or []
    blocks = said.split(",") if isinstance(said, str) else _flat(said)
    return not blocks or prefix.startswith(tuple(blocks))


def _flat(names: Any) -> list[str]:
    """Names of a list, or of lists in it."""
    if isinstance(names, str):
        return [names]
    return [each for name in names for each in _flat(name)] if isinstance(names, list) else []
