"""`inspect`: what a draft is, what quantization can save, what could hurt."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import resolve_draft
from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError, LayoutError, PlanError, VerifyError
from ..frame import arguments
from ..frame.console import megabytes as audit_report_megabytes
from ..frame.console import megabytes as inspect_megabytes
from ..frame.console import print_json, print_table, stdout, table
from ..frame.settings import Settings
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...quantize.drafts import Draft
    from ...quantize.lints import Lint
    from ...quantize.lints.concat import HalfRatio
    from ...quantize.verify.audit import Audit, LinearAudit


@dataclass(frozen=True, slots=True)
class InspectSettings(Settings):
    """Of which draft."""

    draft: arguments.Draft
    _: KW_ONLY
    subtree: arguments.Subtree = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(Brief):
    """What the headers and the config.json of a draft say, whose tensors hold finite numbers.

    Attributes:
        draft: family, geometry and tensors.
        lints: settings that trainers and engines are known to read differently.
        half_ratios: for each linear that reads the concatenated input, how the halves' ranges
            differ; empty for a quantized draft.
        bytes_after: built-in recipe -> bytes of the tensors of its result, or why it does not fit;
            empty for a quantized draft.
        audit: quantized values and scales of a quantized draft; None for an unquantized one.
    """

    draft: "Draft"
    lints: "tuple[Lint, ...]"
    half_ratios: "tuple[HalfRatio, ...]" = ()
    bytes_after: dict[str, int | str] = dataclasses.field(default_factory=dict)
    audit: "Audit | None" = None

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.audit is not None:
            lints = [dataclasses.asdict(lint) for lint in self.lints]
            return {**self.audit.to_mapping(), "lints": lints, **self._sizes()}
        return _summary(self) | self._sizes()

    def _sizes(self) -> dict[str, int]:
        """Tokens of the target, and those that the draft can propose."""
        g = self.draft.geometry
        return {"vocab_size": g.vocab_size, "draft_vocab_size": g.draft_vocab_size}

    @property
    def vocabulary(self) -> str | None:
        """How many of the target's tokens the draft can propose; None where it is all."""
        from ...quantize.drafts.geometry import vocabulary_share

        return vocabulary_share(self.draft.geometry)

    @override
    def brief(self) -> Mapping[str, object]:
        checkpoint = self.draft.checkpoint
        return {
            "family": self.draft.family.name,
            "folder": checkpoint.folder,
            "stored": "quantized" if self.audit is not None else "not quantized",
            "tensors": len(self.draft.rows),
            "head": self.vocabulary,
            "size": megabytes(sum(row.tensor.nbytes for row in self.draft.rows)),
            "lints": ", ".join(one.name for one in self.lints) or "none",
        }


@verb(InspectSettings)
def inspect(settings: InspectSettings) -> Inspection:
    """Describe a draft: its family, its size under each recipe, and settings that are misread.

    Returns:
        Family, geometry and tensors, the bytes after each built-in recipe, and lints. For a
        quantized draft an audit of its quantized values and scales takes the place of the recipes.

    Raises:
        CheckpointError: the folder holds no draft, declares a quantization that is not understood,
            or has a tensor with NaN or infinity.
    """
    from ...quantize.files.digests import check_finite, not_finite
    from ...quantize.inspection import warn_of_a_target
    from ...quantize.stored.stored_declaration import looks_quantized

    checkpoint = resolve_draft(str(settings.draft), settings.subtree).checkpoint()
    found = _quantized(checkpoint) if looks_quantized(checkpoint) else _plain(checkpoint)
    warn_of_a_target(found.draft, settings.listener)
    check_finite(checkpoint.folder, not_finite(checkpoint))
    return found


def _plain(checkpoint: Checkpoint) -> Inspection:
    from ...quantize.drafts import read_draft
    from ...quantize.files.provenance_file import read_provenance
    from ...quantize.lints import find_lints
    from ...quantize.lints.concat import half_ratios
    from ...recipes import built_in_recipes

    draft = read_draft(checkpoint)
    read_provenance(checkpoint.folder)  # a record that cannot be read is an error here too
    return Inspection(
        draft=draft,
        lints=tuple(find_lints(draft)),
        half_ratios=half_ratios(draft),
        bytes_after={name: _bytes_after(name, draft) for name in built_in_recipes()},
    )


def _quantized(checkpoint: Checkpoint) -> Inspection:
    from ...quantize.engines.exclude_findings import misread_excludes
    from ...quantize.files.checkpoint import CONFIG_FILE
    from ...quantize.lints import find_lints
    from ...quantize.verify.audit import audit_checkpoint
    from ...quantize.verify.comparison import Fault

    try:
        found = audit_checkpoint(checkpoint)
        if checkpoint.subtree is not None:
            where, expected = f"{CONFIG_FILE}: quantization_config", "what is stored of the layer"
            said = misread_excludes(checkpoint, target_layers=None).values()
            faults = (Fault(where=where, expected=expected, got=text) for text in said)
            found = dataclasses.replace(found, faults=(*found.faults, *faults))
    except VerifyError as exc:  # nothing was verified: it is the input that is not understood
        raise CheckpointError(exc.where, exc.what, fix=exc.fix) from exc
    return Inspection(
        draft=found.draft,
        lints=tuple(find_lints(found.draft)),
        audit=found,
    )


def _summary(found: Inspection) -> dict[str, Any]:
    from ...quantize.drafts.recognition import is_speculators

    draft = found.draft
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
        "bytes_after": dict(found.bytes_after),
        "concat_half_ratio": [
            {
                "name": r.name,
                "ratio": r.ratio if math.isfinite(r.ratio) else None,  # JSON has no infinity
                "rows": r.num_rows,
                "harmful": r.harmful,
            }
            for r in found.half_ratios
        ],
        "lints": [dataclasses.asdict(lint) for lint in found.lints],
    }


def _bytes_after(name: str, draft: "Draft") -> int | str:
    """Tensor bytes under a built-in recipe, or why it does not fit this draft."""
    from ...quantize.planning.quantization_plan import make_plan
    from ...recipes import load_recipe

    try:
        return make_plan(load_recipe(name), draft).bytes_after
    except (PlanError, LayoutError) as exc:
        return exc.what


# ---- How `draftquant inspect` shows a folder that is stored quantized

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
            f"quantized linears: {audit_report_megabytes(found.quantized_bytes)},"
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


# ---- `draftquant inspect`: what a draft is, what quantization can save, what could hurt
#
# A folder that is stored quantized is audited instead.

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
            savings.row(name, inspect_megabytes(after), f"{after / found['bytes']:.1%}")
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
