"""`draftquant inspect`: what a draft is, what quantization can save, what could hurt.

A folder that is stored quantized is audited instead.
"""

import argparse
import dataclasses
import math
from typing import Any

from ...quantize.drafts import Draft, read_draft
from ...quantize.drafts.speculators_layout import is_speculators
from ...quantize.errors import CheckpointError, LayoutError, PlanError, VerifyError
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import resolve_draft
from ...quantize.files.provenance import QuantizedProvenance, TunedProvenance
from ...quantize.files.provenance_file import read_provenance
from ...quantize.lints import Lint, find_lints
from ...quantize.lints.concat import HalfRatio, half_ratios
from ...quantize.plan import make_plan
from ...quantize.verify.audit import audit, looks_quantized
from ...recipes import built_in_recipes, load_recipe
from ..console import megabytes, print_json, print_table, stdout, table
from .audit_report import audit_mapping, print_audit
from .common import add_subtree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`inspect DRAFT`."""
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id (owner/name)")
    add_subtree(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    checkpoint = resolve_draft(options.draft, options.subtree).checkpoint()
    return (_inspect_quantized if looks_quantized(checkpoint) else _inspect)(
        checkpoint, options.json
    )


def _inspect(checkpoint: Checkpoint, as_json: bool) -> int:
    draft = read_draft(checkpoint)
    lints = find_lints(draft)
    found = _summary(draft, half_ratios(draft), lints)
    record = read_provenance(checkpoint.folder)
    found["retuned"] = isinstance(record, TunedProvenance)
    if as_json:
        print_json(found)
    else:
        _print(found)
    return 0


def _inspect_quantized(checkpoint: Checkpoint, as_json: bool) -> int:
    try:
        found = audit(checkpoint)
    except VerifyError as exc:  # nothing was verified: it is the input that is not understood
        raise CheckpointError(exc.where, exc.what, fix=exc.fix) from exc
    mapping = audit_mapping(found, find_lints(found.draft))
    record = read_provenance(checkpoint.folder)
    mapping["retuned"] = isinstance(record, QuantizedProvenance) and record.retuning is not None
    if as_json:
        print_json(mapping)
    else:
        print_audit(found, mapping)
        _print_lints(mapping["lints"], corrected="when the draft is quantized again")
    return 0


def _summary(
    draft: Draft, ratios: tuple[HalfRatio, ...], lints: tuple[Lint, ...]
) -> dict[str, Any]:
    reads = draft.geometry.reads_features
    tensors = [
        {
            "name": row.tensor.name,
            "role": row.role,
            "dtype": row.tensor.dtype,
            "shape": list(row.tensor.shape),
            "bytes": row.tensor.nbytes,
        }
        for row in draft.rows
    ]
    return {
        "draft": str(draft.checkpoint.folder),
        "family": draft.family.name,
        "architecture": draft.checkpoint.config["architectures"][0],
        "speculators_layout": is_speculators(draft.checkpoint.config),
        "num_layers": draft.geometry.num_layers,
        "aux_layer_ids": draft.geometry.aux_layer_ids,
        "reads_features": reads,
        "reads_last_hidden_state": reads and not getattr(draft.geometry, "fuses", True),
        "parameters": sum(row.tensor.numel for row in draft.rows if row.role != "vocabulary_map"),
        "bytes": draft.checkpoint.nbytes,
        "tensors": tensors,
        "bytes_after": {name: _bytes_after(name, draft) for name in built_in_recipes()},
        "concat_half_ratio": [
            {
                "name": r.name,
                "ratio": r.ratio if math.isfinite(r.ratio) else None,  # JSON has no infinity
                "rows": r.num_rows,
                "harmful": r.harmful,
            }
            for r in ratios
        ],
        "lints": [dataclasses.asdict(lint) for lint in lints],
    }


def _bytes_after(name: str, draft: Draft) -> int | str:
    """Tensor bytes under a built-in recipe, or why it does not fit this draft."""
    try:
        return make_plan(load_recipe(name), draft).bytes_after
    except (PlanError, LayoutError) as exc:
        return exc.what


def _print(found: dict[str, Any]) -> None:
    out = stdout()
    layout = ", speculators layout" if found["speculators_layout"] else ""
    out.line(
        (found["draft"], "bold"),
        f": {found['family']} ({found['architecture']}{layout}),"
        f" {found['num_layers']} layer(s), {found['parameters']:,} parameters,"
        f" {found['bytes']:,} bytes of tensors",
    )
    if found["retuned"]:
        out.line(
            ("RETUNED", "bold magenta"),
            ": not the draft as released: its target taught it, to be what the retuned quantized"
            " draft is compared with (gate --tuned-baseline)",
        )
    out.line(_reads(found))
    tensors = table("Tensors", "name", "role", "dtype", "shape", "bytes", right=("bytes",),
                    spare=("dtype", "role"))  # fmt: skip
    for t in found["tensors"]:
        tensors.row(t["name"], t["role"], t["dtype"], str(t["shape"]), f"{t['bytes']:,}")
    print_table(tensors)
    savings = table("What recipes make of it", "recipe", "size", "share", right=("size", "share"))
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
        return "reads tokens alone, nothing of the target: a language model of its own, or a target"
    if found["reads_last_hidden_state"]:
        return "reads the target's last hidden state, behind its final norm"
    layers = found["aux_layer_ids"] or "default (no eagle_config)"
    return f"reads the outputs of target layers {layers}"


def _print_lints(lints: list[dict[str, Any]], corrected: str = "in the output") -> None:
    out = stdout()
    if not lints:
        out.line("no lints: nothing here that trainers and engines are known to read differently")
        return
    out.line("Lints", style="bold")
    for lint in lints:
        color = {"warning": "yellow", "note": "cyan"}[lint["level"]]
        fixable = f" (quantize --fix-config corrects it {corrected})" if lint["fix"] else ""
        out.line((lint["level"], color), " ", (lint["name"], "bold"), fixable)
        for part in ("cause", "remedy"):
            out.line(f"  {part}: {lint[part]}")
