"""`inspect`: what a draft is, what quantization can save, what could hurt."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...quantize.errors import CheckpointError, LayoutError, PlanError, VerifyError
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import resolve_draft
from ...recipes.brief import Brief, megabytes
from . import arguments
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...quantize.drafts import Draft
    from ...quantize.lints import Lint
    from ...quantize.lints.concat import HalfRatio
    from ...quantize.verify.audit import Audit


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
    from ...quantize.files.finiteness import check_finite, not_finite
    from ...quantize.stored.looks_quantized import looks_quantized
    from .opening import warn_of_a_target

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
    from ...quantize.engines.exclude_mismatches import misread_excludes
    from ...quantize.files.checkpoint import CONFIG_FILE
    from ...quantize.lints import find_lints
    from ...quantize.verify.audit import audit
    from ...quantize.verify.verify_report import Fault

    try:
        found = audit(checkpoint)
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
    from ...quantize.drafts.speculators_layout import is_speculators

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
    from ...quantize.quantization_plan import make_plan
    from ...recipes import load_recipe

    try:
        return make_plan(load_recipe(name), draft).bytes_after
    except (PlanError, LayoutError) as exc:
        return exc.what
