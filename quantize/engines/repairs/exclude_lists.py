"""Excludes: recomputed from what the tensors are, where somebody reads them otherwise."""

import dataclasses
import json

from ...drafts import Row
from ...drafts.runtime_names import excluded_modules, first_layer, modules_in_layers
from ...errors import VerifyError
from ...files.checkpoint import Checkpoint
from ...layouts import get_layout
from ...stored.stored_draft import StoredDraft
from ...verify import exclude_faults
from ..exclude_mismatches import misread_excludes
from .flat_declaration import strictly_read, understood
from .repair import Outcome, Repair, with_declaration

_SHOWN = 3


def repair_excludes(
    checkpoint: Checkpoint, stored: StoredDraft, target_layers: int | None
) -> Outcome:
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
    layout, kept = get_layout(found.layout), _kept(stored)
    first = first_layer(stored.draft.family, target_layers)
    if layout.exact_excludes and first is None and modules_in_layers(kept):
        return _unnumbered(checkpoint, stored)
    wrong = _wrong(checkpoint, stored, target_layers)
    if not wrong:
        return Outcome(checkpoint=checkpoint)
    codes = [row for row in stored.draft.linears() if stored.is_quantized(row)]
    names = excluded_modules(
        stored.draft, kept, codes, whole_names=layout.exact_excludes, target_layers=target_layers
    )
    excludes = layout.excludes(names)
    lists = dict.fromkeys(layout.exclude_keys, excludes)
    repaired = with_declaration(checkpoint, {**found.value, **lists})
    left = _wrong(repaired, stored, target_layers)
    if left:
        note = f"excludes: {wrong[0]}; no list is right for every engine: {left[0]}"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    change = Repair(
        name="excludes",
        wrong="; ".join(wrong[:_SHOWN]) + more,
        written=f"{' and '.join(layout.exclude_keys)}: {json.dumps(excludes)}",
    )
    return Outcome(checkpoint=repaired, repairs=(change,))


def _unnumbered(checkpoint: Checkpoint, stored: StoredDraft) -> Outcome:
    """Whole names of linears in decoder layers, which vLLM numbers after the target's."""
    wrong = _faults(checkpoint, stored)
    if not wrong:
        return Outcome(checkpoint=checkpoint)
    note = (
        "excludes are whole names here, and vLLM numbers the layers of a draft after the target's,"
        f" whose number is not known (give --target-layers): {wrong[0]}"
    )
    return Outcome(checkpoint=checkpoint, notes=(note,))


def _wrong(checkpoint: Checkpoint, stored: StoredDraft, target_layers: int | None) -> list[str]:
    """What engines misread first, then what `verify` says."""
    misread = misread_excludes(checkpoint, stored.canonical, target_layers=target_layers)
    return [*map(str, misread), *_faults(checkpoint, stored)]


def _faults(checkpoint: Checkpoint, stored: StoredDraft) -> list[str]:
    """What `verify` says of the excludes, or why they are not understood."""
    try:
        scheme = strictly_read(checkpoint)
    except VerifyError as exc:
        return [exc.what]
    draft = dataclasses.replace(stored.draft, checkpoint=checkpoint)
    faults = exclude_faults(draft, scheme, stored.modules)
    return [f"{fault.where}: expected {fault.expected}" for fault in faults]


def _kept(stored: StoredDraft) -> list[Row]:
    rows = stored.draft.linears()
    return [row for row in rows if row.module not in stored.modules]
