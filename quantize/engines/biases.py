"""Biases of attention and MLP that config.json asks for, and that engines build or do not.

Executed with every combination that stands in the engines' `biases` (`tests/engines/kinds.py`);
another one is UNKNOWN.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts.fused import GATE_UP, QKV
from .contract import Engine, Finding, Question

_KEYS = ("attention_bias", "mlp_bias")
INPUTS = frozenset(QKV.members)
ATTENTION = INPUTS | {"o_proj"}
MLP = frozenset(GATE_UP.members) | {"down_proj"}


def without_bias_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the same draft without these biases, which every family reads."""
    return {key: value for key, value in config.items() if not (key in _KEYS and value is True)}


def built_biases(engine: Engine, question: Question) -> frozenset[str]:
    """Leaves to which it gives a bias for what config.json says, beside the family's own."""
    return frozenset().union(*(leaves or () for leaves in _asked(engine, question)))


def bias_findings(
    engine: Engine, question: Question, stored: Mapping[str, Any]
) -> Iterator[Finding]:
    """Biases that are built and not stored, and keys of which nothing is known."""
    for leaves in _asked(engine, question):
        if leaves is None:
            what = "attention_bias or mlp_bias: loading was not executed for such a draft"
            yield Finding("unknown", what, "try it, or train the draft without biases")
    built = built_biases(engine, question)
    for module in engine.modules(question) if built else ():
        for part in module.parts:
            biased = part.rpartition(".")[2] in built
            if biased and part in stored and "bias" not in stored[part]:
                text = f"never written: {module.name}.bias, for {part}.bias is not stored"
                yield Finding("wrong", text, "correct attention_bias and mlp_bias of config.json")


def _asked(engine: Engine, question: Question) -> list[frozenset[str] | None]:
    built = engine.biases(question)
    return [
        leaves for key, leaves in zip(_KEYS, built, strict=True) if question.config.get(key) is True
    ]
