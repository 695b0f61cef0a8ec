"""Excludes: recomputed from what the tensors are, where somebody reads them otherwise."""

import dataclasses
import json

from ..checkpoint import Checkpoint
from ..drafts import Row
from ..engines.misread import misread_excludes
from ..errors import VerifyError
from ..layouts import get_layout
from ..runtime_names import excluded_modules, modules_in_layers
from ..verify_excludes import exclude_faults
from .declaration import strictly_read, understood
from .repair import Outcome, Repair, Stored, with_declaration

_SHOWN = 3


def repair_excludes(checkpoint: Checkpoint, stored: Stored, target_layers: int | None) -> Outcome:
    """List what is stored as floats, and nothing else, as the writer of the layout spells it.

    Args:
        checkpoint: declares its quantization in the flat form.
        stored: what its tensors are.
        target_layers: decoder layers of the target; layouts whose excludes are whole names need it
            where a linear of a decoder layer is kept.
    """
    found = understood(checkpoint)
    if found is None or not stored.modules:
        return Outcome(checkpoint=checkpoint)
    wrong = _wrong(checkpoint, stored, target_layers)
    if not wrong:
        return Outcome(checkpoint=checkpoint)
    layout, kept = get_layout(found.layout), _kept(stored)
    layers = target_layers if layout.exact_excludes else None
    excludes = layout.excludes(excluded_modules(stored.draft, kept, target_layers=layers))
    lists = dict.fromkeys(layout.exclude_keys, excludes)
    repaired = with_declaration(checkpoint, {**found.value, **lists})
    left = _wrong(repaired, stored, target_layers)
    if left:
        unknown = layout.exact_excludes and target_layers is None and modules_in_layers(kept)
        hint = " (give --target-layers)" if unknown else ""
        note = f"excludes: {wrong[0]}; no list is right for every engine: {left[0]}{hint}"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    change = Repair(
        name="excludes",
        wrong="; ".join(wrong[:_SHOWN]) + more,
        written=f"{' and '.join(layout.exclude_keys)}: {json.dumps(excludes)}",
    )
    return Outcome(checkpoint=repaired, repairs=(change,))


def _wrong(checkpoint: Checkpoint, stored: Stored, target_layers: int | None) -> list[str]:
    """What engines misread first, then what `verify` says."""
    try:
        scheme = strictly_read(checkpoint)
    except VerifyError as exc:
        return [exc.what]
    misread = misread_excludes(checkpoint, stored.canonical, target_layers=target_layers)
    draft = dataclasses.replace(stored.draft, checkpoint=checkpoint)
    faults = exclude_faults(draft, scheme, stored.modules)
    return [*map(str, misread), *(f"{f.where}: expected {f.expected}" for f in faults)]


def _kept(stored: Stored) -> list[Row]:
    rows = stored.draft.linears()
    return [row for row in rows if row.tensor.name.removesuffix(".weight") not in stored.modules]
