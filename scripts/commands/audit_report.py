"""How `draftquant inspect` shows a folder that is stored quantized."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..console import megabytes, print_table, stdout, table

if TYPE_CHECKING:
    from ...quantize.verify.audit import Audit, LinearAudit

_LOST = 0.75
"""Share of zero codes from which a half of a concat input is lost.

Gaussian halves that are 4 apart (`concat.HARMFUL_RATIO`) give this share under INT4 per channel.
"""


def print_audit(found: "Audit", mapping: Mapping[str, Any], vocabulary: str | None = None) -> None:
    """Print what the folder declares, a line per linear, then every fault.

    Args:
        found: the audit.
        mapping: the same as `Inspection.to_mapping` gives it.
        vocabulary: how much of it the head has; None where it is all.
    """
    out = stdout()
    layout = ", speculators layout" if mapping["speculators_layout"] else ""
    out.line(
        (mapping["draft"], "bold"),
        f": {mapping['family']} ({mapping['architecture']}{layout}),"
        f" {mapping['num_layers']} layer(s), quantized: {len(found.linears)} linears,"
        f" {mapping['bytes']:,} bytes of tensors",
    )
    out.line(f"declared: {found.scheme or 'nothing'}")
    made_by = "; ".join(found.made_by) or "unknown (no file names the tool)"
    out.line(f"made by: {made_by}")
    for layer, scales in found.cache.items():
        k, v = (", ".join(f"{value:.6g}" for value in each) for each in (scales.k, scales.v))
        out.line(f"KV cache of layer {layer}: k_scale {k}; v_scale {v}")
    if found.cache and {v for each in found.cache.values() for v in (*each.k, *each.v)} == {1.0}:
        out.line("these scales are all 1: nobody measured them, and what exceeds 448 is cut off")
    if vocabulary is not None:
        out.line(vocabulary)
    if found.bits_per_weight is not None:
        out.line(
            f"quantized linears: {megabytes(found.quantized_bytes)},"
            f" {found.bits_per_weight:.3f} bits per weight with scales"
        )
    for form, count in _forms(found).items():
        out.line(f"stored as: {form} ({count} linears)")
    _print_linears(found)
    _print_halves(found)
    _print_faults(found)


def _forms(found: "Audit") -> dict[str, int]:
    """The ways in which linears are stored, by suffix and dtype, and how many are stored so."""
    forms: dict[str, int] = {}
    for linear in found.linears:
        parts = (f"{t.name.rpartition('.')[2]} {t.dtype}" for t in linear.tensors)
        form = ", ".join(parts)
        forms[form] = forms.get(form, 0) + 1
    return forms


def _print_linears(found: "Audit") -> None:
    columns: tuple[str, ...] = (
        "shape",
        "bytes",
        "scales",
        "smallest",
        "largest",
        "ends",
        "zero",
        "values",
        "fit",
    )
    static = any(linear.input_scale is not None for linear in found.linears)
    columns += ("input scale",) if static else ()
    rows = table("Quantized linears", "linear", "role", *columns, right=columns)
    for linear in found.linears:
        shape = "x".join(map(str, linear.shape))
        cells = [linear.module, linear.role, shape, f"{linear.nbytes:,}", *_code_cells(linear)]
        rows.row(*cells, *([_number(linear.input_scale)] if static else []))
    print_table(rows)
    stdout().line(
        "ends: share of values at an end of the range; values: distinct values; fit: scales with a"
        " value near that end",
        style="dim",
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


def _print_halves(found: "Audit") -> None:
    """The two halves of the concat input, where one scale covers both."""
    for linear in found.linears:
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


def _print_faults(found: "Audit") -> None:
    out = stdout()
    if not found.faults:
        out.line(
            "no faults: everything is stored as declared. `draftquant verify --against` shows"
            " whether the values are those of a draft"
        )
        return
    count = len(found.faults)
    out.line(
        (f"{count} fault{'s' * (count != 1)}", "bold yellow"),
        "; of config.json, write by hand what is expected there",
    )
    for fault in found.faults:
        out.line(f"  {fault.where}")
        out.line(f"    expected {fault.expected}")
        out.line(f"    got {fault.got}")
