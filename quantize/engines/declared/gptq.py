"""GPTQ, as GPTQModel and AutoGPTQ store it, and AutoRound, which packs as GPTQ does or as AWQ does.

Source: `AutoGPTQConfig` and `INCConfig` of vLLM 0.33.0, `GPTQMarlinConfig` and `AutoRoundConfig` of
SGLang 0.5.23. Neither reads `checkpoint_format`: symmetric codes need no zero points.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, Part, Parts
from ..linear_scheme import Group, LinearScheme, linear_scheme, not_read, words
from .autoawq import awq_parts

_UNREAD = ("g_idx",)
"""In order where inputs are not ordered by activation; vLLM 0.33 drops it (`base_config.py`)."""
_ROUND_TO_NEAREST = "auto_round:auto_gptq"
_FOR_REGEX = frozenset("*+?^$()[]{}|\\")


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, and before it one for each rule of `dynamic` with keys of its own."""
    if declared.get("lm_head"):
        not_read("lm_head", declared["lm_head"])
    return (*_by_rules(declared), Group(EVERY_LINEAR, _gptq(declared)))


def _by_rules(declared: Mapping[str, Any]) -> Iterator[Group]:
    """`get_dynamic_override`: the first expression that matches from the start of a name."""
    for pattern, own in _mapping(declared, "dynamic").items():
        if not pattern.startswith("-:") and own:
            changed = {**declared, **_mapping({"dynamic": own}, "dynamic")}
            yield Group((f"re:{pattern.removeprefix('+:')}",), _gptq(changed))


def _gptq(declared: Mapping[str, Any]) -> LinearScheme:
    bits, size, ordered = _number(declared, "bits"), _group_size(declared), declared.get("desc_act")
    symmetric = declared.get("sym")
    if type(ordered) is not bool or type(symmetric) is not bool:
        not_read("desc_act, sym", (ordered, symmetric))
    return _packed("gptq", bits, size, symmetric=symmetric, ordered=ordered and size is not None)


def auto_round_groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, packed as `packing_format` says; before it those of `extra_config`."""
    kind, backend = declared.get("data_type", "int"), declared.get("backend", "auto")
    if kind != "int" or backend != "auto":
        not_read("data_type, backend", (kind, backend))
    own = []
    for name, changes in _mapping(declared, "extra_config").items():
        if not isinstance(changes, Mapping):
            not_read("extra_config", name)
        bits = changes.get("bits", 0)
        if type(bits) is not int:
            not_read("extra_config", name)
        if bits < 16:
            said = {k: v for k, v in changes.items() if k in ("bits", "group_size", "sym")}
            own.append(Group(_targets(name), _auto_round({**declared, **said})))
    return (*own, Group(EVERY_LINEAR, _auto_round(declared)))


def _targets(name: str) -> tuple[str, ...]:
    """An expression is searched anywhere in a name; vLLM takes a name by its end as well."""
    return (f"re:.*(?:{name})",) if _FOR_REGEX & set(name) else (name,)


def _auto_round(declared: Mapping[str, Any]) -> LinearScheme:
    bits, size = _number(declared, "bits"), _group_size(declared)
    symmetric = declared.get("sym", True)
    if type(symmetric) is not bool:
        not_read("sym", symmetric)
    packing = declared.get("packing_format", _ROUND_TO_NEAREST)
    if packing == _ROUND_TO_NEAREST:
        return _packed("auto-round", bits, size, symmetric=symmetric, ordered=False)
    if packing != "auto_round:auto_awq" or bits != 4:
        not_read("packing_format, bits", (packing, bits))
    dtype, how = "awq-int4" + ("" if symmetric else "+"), "group" if size else "channel"
    return linear_scheme("auto-round", dtype, how, size, "none", "qweight", awq_parts(size or -1))


def _packed(
    method: str, bits: int, size: int | None, *, symmetric: bool, ordered: bool
) -> LinearScheme:
    """Codes in words along the inputs, a row of scales for each group of inputs."""

    def parts(rows: int, columns: int) -> Parts:
        of_row = -(-columns // (size or columns))
        return {
            "qweight": Part(("I32",), (words(columns, bits), rows)),
            "qzeros": Part(("I32",), (of_row, words(rows, bits))),
            "scales": Part(FLOAT_DTYPES, (of_row, rows)),
            "g_idx": Part(("I32",), (columns,)),
        }

    dtype = f"int{bits}" + ("" if symmetric else "+")
    how = "ordered" if ordered else ("group" if size else "channel")
    return linear_scheme(method, dtype, how, size, "none", "qweight", parts, not_read=_UNREAD)


def _group_size(declared: Mapping[str, Any]) -> int | None:
    """None for one group in a row."""
    size = declared.get("group_size")
    if type(size) is not int or not (size > 0 or size == -1):
        not_read("group_size", size)
    return size if size > 0 else None


def _number(declared: Mapping[str, Any], key: str) -> int:
    value = declared.get(key)
    return value if type(value) is int and value > 0 else not_read(key, value)


def _mapping(declared: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = declared.get(key) or {}
    return value if isinstance(value, Mapping) else not_read(key, value)
