"""Routed experts of an MTP layer that are stored as floats in a quantized target.

Engines fuse them into one module, which is no linear: excludes mean it by rules of its own.
Executed: `tests/engines/inside.py`.
"""

from ..drafts.engine_traits import Finding
from ..stored.parts import COMPANIONS
from .contract import Module, Question, UnsureError
from .engine import Engine
from .exclude_keys import gptq_by_rules
from .float_findings import excluding
from .mtp import GRAFT, GRAFTED, ROUTED, first_prefix


def float_experts(engine: Engine, question: Question) -> Finding | None:
    """What becomes of them; None where there are none, or where they are served as they are."""
    served, declared, rules = question.own.mtp, question.declaration, engine.declaration
    names = [n for n in question.tensor_names if ROUTED in n and n.endswith(".weight")]
    codes = any(ROUTED in n and n.rpartition(".")[2] in COMPANIONS for n in question.tensor_names)
    if served is None or not question.inside_target or declared is None or codes or not names:
        return None
    first = first_prefix(question, served)
    single = [f"{first}{n[n.index('mlp.') : -len('.weight')]}" for n in names]
    whole = single[0].partition(ROUTED)[0] + ROUTED.rstrip(".")

    def excluded(name: str) -> bool:
        asked = Module(name, name, (), "column")
        if question.method == "gptq":  # never by lists: `auto_gptq.py:80` of vLLM
            return gptq_by_rules(question, asked, ())
        return rules.is_excluded(question, asked) is True

    try:
        by_whole, by_single = excluded(whole), set(map(excluded, single))
    except UnsureError as exc:
        return Finding("unknown", str(exc), "write excludes as plain patterns")
    listed = question.method in rules.experts_by_name and set(single) <= set(declared.excludes)
    named = question.method in rules.experts_by_name - {"compressed-tensors"} and by_whole
    if listed or named or (by_whole and by_single == {True}):
        return None
    remedy = excluding(engine, question, Module(whole, whole, (), "column"))
    if remedy.startswith("exclude"):
        remedy = f"exclude each expert of the layer by its name, and {whole!r}"
        remedy += f"; or {GRAFT}" if question.method in GRAFTED else ""
    if question.method not in GRAFTED or by_whole or True in by_single:
        text = f"How {engine.title} takes {whole} was never executed with these excludes"
        return Finding("unknown", text, remedy)
    text = f"{engine.title} takes {whole} as quantized, and its experts are stored as floats"
    return Finding("wrong", text, remedy)
