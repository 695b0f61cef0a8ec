"""What a draft's headers say: opened, inspected with lints or an audit, planned by a recipe."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..recipes import built_in_recipes, load_recipe
from ..recipes.brief import Brief, megabytes
from ..recipes.chosen_recipe import chosen_recipe
from ..recipes.errors import CheckpointError, LayoutError, PlanError, VerifyError
from ..recipes.listener import SILENT, Listener
from .asked import Planning
from .drafts import Draft, Row, read_draft
from .drafts.architectures import declared_architecture
from .drafts.geometry import vocabulary_share
from .drafts.recognition import is_speculators
from .engines.contract import EngineCheck, loading_places
from .files.checkpoint import Checkpoint
from .files.hub import DraftSource, resolve_draft
from .planning.quantization_plan import Plan, make_plan
from .stored.stored_declaration import looks_quantized

if TYPE_CHECKING:
    from .drafts.family import Lint
    from .lints.value_lints import HalfRatio
    from .verify import Audit


def open_draft(
    reference: object,
    subtree: str | None = None,
    listener: Listener = SILENT,
    roles: Sequence[str] = (),
) -> tuple[DraftSource, Draft]:
    """Resolve a folder or Hub id and read its headers and vocabulary map."""
    from .lints.value_lints import check_vocabulary_map  # numpy, which help does not need

    source = resolve_draft(str(reference), subtree)
    draft = read_draft(dataclasses.replace(source.checkpoint(), roles=tuple(roles)))
    check_vocabulary_map(draft)
    warn_of_kind(draft, listener)
    return source, draft


def warn_of_kind(draft: Draft, listener: Listener) -> None:
    """A whole language model may be a draft, or the target by mistake; or no family reads it."""
    if draft.family.notice is not None:
        listener.warning(draft.family.notice)
    if not draft.family.is_whole_model:
        return
    size = megabytes(draft.checkpoint.nbytes)
    listener.warning(
        f"{draft.checkpoint.folder.name} is a whole language model ({size},"
        f" {draft.geometry.num_layers} layers): right if a server drafts with it, beside a larger"
        " target; if it is the target itself, give the folder of its draft instead"
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(Brief):
    """What the headers and the config.json of a draft say; its tensors hold finite numbers.

    Attributes:
        draft: family, geometry and tensors.
        lints: settings that trainers and engines are known to read differently.
        half_ratios: for each linear that reads the concatenated input, how the halves' ranges
            differ; empty for a quantized draft.
        bytes_after: built-in recipe -> bytes of the tensors of its result, or why it does not fit;
            empty for a quantized draft.
        audit: quantized values and scales of a quantized draft; None for an unquantized one.
    """

    draft: Draft
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
            "lints": ", ".join(lint.name for lint in self.lints) or "none",
        }


def inspect_draft(
    reference: object, subtree: str | None, listener: Listener, roles: Sequence[str]
) -> Inspection:
    """A draft as it is stored, quantized or not; CheckpointError where a tensor is not finite."""
    from .files.finiteness import check_finite, not_finite

    checkpoint = resolve_draft(str(reference), subtree).checkpoint()
    checkpoint = dataclasses.replace(checkpoint, roles=tuple(roles))
    inspection = _quantized(checkpoint) if looks_quantized(checkpoint) else _plain(checkpoint)
    warn_of_kind(inspection.draft, listener)
    check_finite(checkpoint.folder, not_finite(checkpoint))
    return inspection


def _plain(checkpoint: Checkpoint) -> Inspection:
    from .files.provenance_file import read_provenance
    from .lints.catalogue import find_lints
    from .lints.value_lints import half_ratios

    draft = read_draft(checkpoint)
    read_provenance(checkpoint.folder)  # a record that cannot be read is an error here too
    return Inspection(
        draft=draft,
        lints=tuple(find_lints(draft)),
        half_ratios=half_ratios(draft),
        bytes_after={name: _bytes_after(name, draft) for name in built_in_recipes()},
    )


def _quantized(checkpoint: Checkpoint) -> Inspection:
    from .lints.catalogue import find_lints
    from .verify import audit_checkpoint

    try:
        audit = audit_checkpoint(checkpoint)
    except VerifyError as exc:  # nothing was verified: the input is not understood
        raise CheckpointError(exc.where, exc.what, fix=exc.fix) from exc
    return Inspection(draft=audit.draft, lints=tuple(find_lints(audit.draft)), audit=audit)


def _summary(inspection: Inspection) -> dict[str, Any]:
    draft = inspection.draft
    reads = draft.geometry.reads_features
    tensors = [
        {
            "name": row.tensor.name,
            "role": row.role,
            **_given(row),
            "dtype": row.tensor.dtype,
            "shape": list(row.tensor.shape),
            "bytes": row.tensor.nbytes,
        }
        for row in draft.rows
    ]
    return {
        "draft": str(draft.checkpoint.folder),
        "family": draft.family.name,
        "architecture": declared_architecture(draft.checkpoint.config) or "no architecture",
        "speculators_layout": is_speculators(draft.checkpoint.config),
        "num_layers": draft.geometry.num_layers,
        "aux_layer_ids": draft.geometry.aux_layer_ids,
        "reads_features": reads,
        "reads_last_hidden_state": reads and not draft.geometry.fuses,
        "parameters": sum(row.tensor.numel for row in draft.rows if row.role != "vocabulary_map"),
        "bytes": draft.checkpoint.nbytes,
        "tensors": tensors,
        "bytes_after": dict(inspection.bytes_after),
        "concat_half_ratio": [
            {
                "name": r.name,
                "ratio": r.ratio if math.isfinite(r.ratio) else None,  # JSON has no infinity
                "rows": r.num_rows,
                "harmful": r.harmful,
            }
            for r in inspection.half_ratios
        ],
        "lints": [dataclasses.asdict(lint) for lint in inspection.lints],
    }


def _given(row: Row) -> dict[str, str]:
    """The rule that gave the role, of a draft that no family reads."""
    return {} if row.given_by is None else {"given_by": row.given_by}


def _bytes_after(name: str, draft: Draft) -> int | str:
    """Tensor bytes under a built-in recipe, or why it does not fit this draft."""
    try:
        return make_plan(load_recipe(name), draft).bytes_after
    except (PlanError, LayoutError) as exc:
        return exc.what


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Brief):
    """What a recipe would do to a draft, found out from headers alone.

    Attributes:
        plan: every tensor with its rule, its action and its bytes.
        loads: what each known engine does with the result, on each of its GPUs.
        warnings: what the command line prints as warnings.
    """

    plan: Plan
    loads: tuple[EngineCheck, ...]
    warnings: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        from .engines.plan_verdicts import to_mapping

        return {**self.plan.to_mapping(), "engines": to_mapping(self.loads)}

    @override
    def brief(self) -> Mapping[str, object]:
        plan = self.plan
        return {
            "recipe": plan.recipe.name,
            "draft": plan.draft.checkpoint.folder,
            "linears": f"{len(plan.quantized)} to quantize",
            "size": f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}",
            "loads in": loading_places(self.loads),
            "warnings": len(self.warnings) or None,
        }


def plan_draft(asked: Planning) -> PlanReport:
    """What a recipe would do to every tensor of a draft, and where the result would load."""
    from .engines.plan_verdicts import nothing_loads, planned_verdicts

    _, draft = open_draft(asked.draft, asked.subtree, asked.listener, asked.roles)
    recipe = chosen_recipe(asked.choice, asked.listener)
    made = make_plan(recipe, draft, target_layers=asked.target_layers)
    loads = planned_verdicts(made)
    if problem := nothing_loads(made, loads):
        asked.listener.warning(problem)
    return PlanReport(plan=made, loads=loads)
