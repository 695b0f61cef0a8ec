"""`draftquant inspect`: what a draft is, what quantization can save, what could hurt.

A folder that is stored quantized is audited instead.
"""

import argparse
from typing import Any

from ..api.inspect import inspect
from ..console import megabytes, print_json, print_table, stdout, table
from .audit_report import print_audit

VERB = inspect


def run(options: argparse.Namespace) -> int:
    """Print what the draft is."""
    found = inspect.run(options.settings)
    vocabulary = found.vocabulary
    mapping = found.to_mapping()
    if options.json:
        print_json(mapping)
    elif found.audit is None:
        _print(mapping, vocabulary)
    else:
        print_audit(found.audit, mapping, vocabulary)
        _print_lints(mapping["lints"], corrected="when the draft is quantized again")
    return 0


def _print(found: dict[str, Any], vocabulary: str | None) -> None:
    out = stdout()
    layout = ", speculators layout" if found["speculators_layout"] else ""
    out.line(
        (found["draft"], "bold"),
        f": {found['family']} ({found['architecture']}{layout}),"
        f" {found['num_layers']} layer(s), {found['parameters']:,} parameters,"
        f" {found['bytes']:,} bytes of tensors",
    )
    if vocabulary is not None:
        out.line(vocabulary)
    out.line(_reads(found))
    tensors = table("Tensors", "name", "role", "dtype", "shape", "bytes", right=("bytes",),
                    spare=("dtype", "role"))  # fmt: skip
    for t in found["tensors"]:
        tensors.row(t["name"], t["role"], t["dtype"], str(t["shape"]), f"{t['bytes']:,}")
    print_table(tensors)
    savings = table("Size by recipe", "recipe", "size", "share", right=("size", "share"))
    for name, after in found["bytes_after"].items():
        if isinstance(after, str):
            savings.row(name, after, "")
        else:
            savings.row(name, megabytes(after), f"{after / found['bytes']:.1%}")
    print_table(savings)
    for ratio in found["concat_half_ratio"]:
        size = "infinite" if ratio["ratio"] is None else f"{ratio['ratio']:.2f}"
        advice = "balanced enough for one scale per row"
        if ratio["harmful"]:
            advice = (
                "one INT4 scale per row would round the smaller half to zero: use a recipe with"
                " balance_concat: auto (int4-channel, mi325x-w4a8)"
            )
        out.line(
            f"{ratio['name']}: hidden half / embedding half = {size}"
            f" ({ratio['rows']} rows): {advice}"
        )
    _print_lints(found["lints"])


def _reads(found: dict[str, Any]) -> str:
    """What the draft is fed besides tokens."""
    if not found["reads_features"]:
        return "reads tokens only, no hidden states: a language model of its own, or a target"
    if found["reads_last_hidden_state"]:
        return "reads the target's last hidden state, behind its final norm"
    layers = found["aux_layer_ids"] or "default (no eagle_config)"
    return f"reads the outputs of target layers {layers}"


def _print_lints(lints: list[dict[str, Any]], corrected: str = "in the output") -> None:
    out = stdout()
    if not lints:
        out.line(
            "no lints: trainers and engines are not known to interpret this config differently"
        )
        return
    out.line("Lints", style="bold")
    for lint in lints:
        color = {"warning": "yellow", "note": "cyan"}[lint["level"]]
        fixable = f" (quantize --fix-config corrects it {corrected})" if lint["fix"] else ""
        out.line((lint["level"], color), " ", (lint["name"], "bold"), fixable)
        for part in ("cause", "remedy"):
            out.line(f"  {part}: {lint[part]}")
