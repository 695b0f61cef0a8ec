"""GPTQ, as GPTQModel and AutoGPTQ store it, and AutoRound, which packs as GPTQ does or as AWQ does.

Source: `AutoGPTQConfig` and `INCConfig` of vLLM 0.33.0, `GPTQMarlinConfig` and `AutoRoundConfig` of
SGLang 0.5.23. Neither reads `checkpoint_format`: symmetric codes need no zero points.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, Part, Parts
from ..linear_scheme import Group, LinearScheme, count, linear_scheme, not_read, words
from .autoawq import awq_parts

_UNREAD = ("g_idx",)
"""In order where inputs are not ordered by activation; vLLM 0.33 drops it (`base_config.py`)."""


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear. Rules that give some of them another format are not read."""
    for pattern, own in _mapping(declared, "dynamic").items():
        if not pattern.startswith("-:") and own:
            not_read("dynamic", pattern)
    bits, size, ordered = _number(declared, "bits"), _group_size(declared), declared.get("desc_act")
    symmetric = declared.get("sym")
    if declared.get("lm_head"):
        not_read("lm_head", declared["lm_head"])
    if type(ordered) is not bool or type(symmetric) is not bool:
        not_read("desc_act, sym", (ordered, symmetric))
    scheme = _packed("gptq", bits, size, symmetric=symmetric, ordered=ordered and size is not None)
    return (Group(EVERY_LINEAR, scheme),)


def auto_round_groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, packed as `packing_format` says."""
    for name, own in _mapping(declared, "extra_config").items():
        if not isinstance(own, Mapping) or own.get("bits", 0) < 16:
            not_read("extra_config", name)
    kind, backend = declared.get("data_type", "int"), declared.get("backend", "auto")
    bits, size, symmetric = _number(declared, "bits"), _group_size(declared), declared.get("sym")
    if kind != "int" or backend != "auto" or type(symmetric) is not bool:
        not_read("data_type, backend, sym", (kind, backend, symmetric))
    packing = declared.get("packing_format", "auto_round:auto_gptq")
    if packing == "auto_round:auto_gptq":
        scheme = _packed("auto-round", bits, size, symmetric=symmetric, ordered=False)
    elif packing == "auto_round:auto_awq" and bits == 4:
        dtype = "awq-int4" + ("" if symmetric else "+")
        how = "group" if size else "channel"
        scheme = linear_scheme(
            "auto-round", dtype, how, size, "none", "qweight", awq_parts(size or -1)
        )
    else:
        not_read("packing_format", packing)
    return (Group(EVERY_LINEAR, scheme),)


def _packed(
    method: str, bits: int, size: int | None, *, symmetric: bool, ordered: bool
) -> LinearScheme:
    """Codes in words along the inputs, a row of scales for each group of inputs."""

    def parts(rows: int, columns: int) -> Parts:
        of_row = count(columns, size)
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
