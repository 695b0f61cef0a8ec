"""`inspect`: what a draft is, what quantization can save, what could hurt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ...quantize.files.hub import Reference
from ...recipes.listener import Heard
from ..frame import reports
from ..frame.console import megabytes, print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...quantize.verify.audit import Audit, LinearAudit


@dataclass(frozen=True)
class InspectSettings(Heard):
    """Which draft."""

    draft: Reference
    _: KW_ONLY
    subtree: str | None = None
    roles: Sequence[str] = ()


@verb(InspectSettings)
def inspect(settings: InspectSettings) -> "reports.Inspection":
    """Describe a draft: its family, its size under each recipe, and settings that are misread.

    Returns:
        Family, geometry and tensors, the bytes after each built-in recipe, and lints. For a
        quantized draft an audit of its quantized values and scales takes the place of the recipes.

    Raises:
        CheckpointError: the folder holds no draft, declares a quantization that is not understood,
            or has a tensor with NaN or infinity.
    """
    from ...quantize.inspection import inspect_draft

    return inspect_draft(settings.draft, settings.subtree, settings.listener, settings.roles)


def _show(report: "reports.Inspection", _settings: object) -> None:
    mapping = report.to_mapping()
    if report.audit is None:
        _print(mapping, report.vocabulary, known=report.draft.family.has_maths)
    else:
        _print_audit(report.audit, mapping, report.vocabulary)
        _print_lints(mapping["lints"], corrected="when the draft is quantized again")


def _print(mapping: dict[str, Any], vocabulary: str | None, *, known: bool) -> None:
    out = stdout()
    out.line(
        (mapping["draft"], "bold"),
        f": {_form(mapping)}, {mapping['parameters']:,} parameters,"
        f" {mapping['bytes']:,} bytes of tensors",
    )
    if vocabulary is not None:
        out.line(vocabulary)
    if known:
        out.line(_reads(mapping))
    tensors = table("Tensors", "name", "role", "dtype", "shape", "bytes",
                    spare=("dtype", "role"))  # fmt: skip
    for t in mapping["tensors"]:
        role = f"{t['role']} ({t['given_by']})" if "given_by" in t else t["role"]
        tensors.row(t["name"], role, t["dtype"], str(t["shape"]), f"{t['bytes']:,}")
    print_table(tensors)
    savings = table("Size by recipe", "recipe", "size", "share")
    for name, after in mapping["bytes_after"].items():
        if isinstance(after, str):
            savings.row(name, after, "")
        else:
            savings.row(name, megabytes(after), f"{after / mapping['bytes']:.1%}")
    print_table(savings)
    shapes = {t["name"]: t["shape"] for t in mapping["tensors"]}
    for ratio in mapping["concat_half_ratio"]:
        rows, whole = ratio["rows"], shapes[ratio["name"]][0]
        of_rows = f"{rows} rows" if rows == whole else f"{rows} of {whole} rows"
        size = "infinite" if ratio["ratio"] is None else f"{ratio['ratio']:.2f}"
        advice = "balanced enough for one scale per row"
        if ratio["harmful"]:
            advice = (
                "one INT4 scale per row would round the smaller half to zero: use a recipe with"
                " balance_concat: auto (int4-channel, mi325x-w4a8)"
            )
        out.line(f"{ratio['name']}: hidden half / embedding half = {size} ({of_rows}): {advice}")
    if known:
        _print_lints(mapping["lints"])


def _form(mapping: Mapping[str, Any]) -> str:
    layout = ", speculators layout" if mapping["speculators_layout"] else ""
    architecture = f"{mapping['architecture']}{layout}"
    return f"{mapping['family']} ({architecture}), {mapping['num_layers']} layer(s)"


def _reads(mapping: dict[str, Any]) -> str:
    if not mapping["reads_features"]:
        return "reads tokens only, no hidden states: a language model of its own, or a target"
    if mapping["reads_last_hidden_state"]:
        return "reads the target's last hidden state, behind its final norm"
    layers = mapping["aux_layer_ids"] or "default (no eagle_config)"
    return f"reads the outputs of target layers {layers}"


def _print_lints(lints: list[dict[str, Any]], corrected: str = "in the output") -> None:
    out = stdout()
    if not lints:
        out.line(
            "no lints: trainers and engines are not known to interpret this config differently"
        )
        return
    out.line("Lints")
    for lint in lints:
        color = {"warning": "yellow", "note": "cyan"}[lint["level"]]
        fixable = f" (quantize --fix-config corrects it {corrected})" if lint["fix"] else ""
        out.line((lint["level"], color), " ", (lint["name"], "bold"), fixable)
        for part in ("cause", "remedy"):
            out.line(f"  {part}: {lint[part]}")


_LOST = 0.75
"""Share of zero codes at which a half of a concat input counts as lost.

Gaussian halves that differ by 4 (`concat.HARMFUL_RATIO`) have this share under INT4 per channel.
"""


def _print_audit(audit: "Audit", mapping: Mapping[str, Any], vocabulary: str | None) -> None:
    out = stdout()
    out.line(
        (mapping["draft"], "bold"),
        f": {_form(mapping)}, quantized: {len(audit.linears)} linears,"
        f" {mapping['bytes']:,} bytes of tensors",
    )
    out.line(f"declared: {audit.scheme or 'nothing'}")
    made_by = "; ".join(audit.made_by) or "unknown (no file names the tool)"
    out.line(f"made by: {made_by}")
    for layer, scales in audit.cache.items():
        k, v = (", ".join(f"{value:.6g}" for value in each) for each in (scales.k, scales.v))
        out.line(f"KV cache of layer {layer}: k_scale {k}; v_scale {v}")
    if audit.cache and {v for each in audit.cache.values() for v in (*each.k, *each.v)} == {1.0}:
        out.line("these scales are all 1: nobody measured them, and what exceeds 448 is cut off")
    if vocabulary is not None:
        out.line(vocabulary)
    if audit.bits_per_weight is not None:
        out.line(
            f"quantized linears: {megabytes(audit.quantized_bytes)},"
            f" {audit.bits_per_weight:.3f} bits per weight with scales"
        )
    forms = Counter(
        ", ".join(f"{t.name.rpartition('.')[2]} {t.dtype}" for t in linear.tensors)
        for linear in audit.linears
    )
    for form, count in forms.items():
        out.line(f"stored as: {form} ({count} linears)")
    _print_linears(audit)
    _print_halves(audit)
    _print_faults(audit)


def _print_linears(audit: "Audit") -> None:
    columns: tuple[str, ...] = (
        "shape", "bytes", "scales", "smallest", "largest", "ends", "zero", "values", "fit",
    )  # fmt: skip
    static = any(linear.input_scale is not None for linear in audit.linears)
    columns += ("input scale",) if static else ()
    rows = table("Quantized linears", "linear", "role", *columns)
    for linear in audit.linears:
        shape = "x".join(map(str, linear.shape))
        cells = [linear.module, linear.role, shape, f"{linear.nbytes:,}", *_code_cells(linear)]
        rows.row(*cells, *([_number(linear.input_scale)] if static else []))
    print_table(rows)
    stdout().line(
        "ends: share of values at an end of the range; values: distinct values; fit: scales with a"
        " value near that end"
    )


def _code_cells(linear: "LinearAudit") -> list[str]:
    codes = linear.codes
    if codes is None:
        return ["not decoded", *[""] * 6]
    return [
        f"{codes.num_scales:,}",
        _number(codes.smallest_scale),
        _number(codes.largest_scale),
        f"{codes.saturated:.2%}",
        f"{codes.zero:.2%}",
        f"{codes.distinct}/{codes.possible}",
        "" if codes.scales_fit is None else f"{codes.scales_fit:.2%}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _print_halves(audit: "Audit") -> None:
    for linear in audit.linears:
        halves = linear.codes.zero_halves if linear.codes else None
        if halves is None:
            continue
        embedding, hidden = halves
        advice = ""
        if max(halves) >= _LOST:
            advice = ": one scale for both halves rounded the smaller one away"
        stdout().line(
            f"{linear.module}: {embedding:.1%} of the quantized values of the embedding half are"
            f" zero, and {hidden:.1%} of the hidden half's{advice}"
        )


def _print_faults(audit: "Audit") -> None:
    out = stdout()
    if not audit.faults:
        out.line(
            "no faults: everything is stored as declared. `draftquant verify --against` shows"
            " whether the values are those of a draft"
        )
        return
    count = len(audit.faults)
    out.line(
        (f"{count} fault{'s' * (count != 1)}", "bold yellow"),
        "; of config.json, write by hand what is expected there",
    )
    for fault in audit.faults:
        out.line(f"  {fault.where}")
        out.line(f"    expected {fault.expected}")
        out.line(f"    got {fault.got}")


COMMAND = Command(inspect, _show)
