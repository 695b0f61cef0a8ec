"""The order of nibbles in Quark's INT4 words: proven by decoding against the source, never guessed.

Quark 0.13 from file to file packs in `order` and declares `reorder`: engines load such a folder
without an error, with every weight in another column.
"""

import dataclasses

from ...drafts import Draft
from ...errors import CheckpointError
from ...files.checkpoint import Checkpoint
from ...stored.declarations import DeclaredScheme
from ...stored.layouts.scheme import PACK_METHODS, PackMethod
from ...stored.parts import BESIDE_CODES, stored_parts
from ...stored.stored_draft import StoredDraft
from ...verify import not_nearest
from .flat_declaration import Understood, understood
from .repair import Outcome, Repair, with_declaration


def repair_pack_order(checkpoint: Checkpoint, stored: StoredDraft, source: Draft | None) -> Outcome:
    """Declare the one order under which every code is the nearest rounding of the source.

    Args:
        checkpoint: declares its quantization in the flat form.
        stored: what its tensors are.
        source: the draft that it was made from; None = the order cannot be proven.

    Raises:
        CheckpointError: under neither order are the codes those of the source.
    """
    found = understood(checkpoint)
    said = found.scheme.pack_method if found else None
    if found is None or said is None or not found.scheme.layout.declares_pack_order:
        return Outcome(checkpoint=checkpoint)
    if source is None:
        note = f"the pack order {said!r} is not proven: give the BF16 draft (--against)"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    absent = _undecodable(checkpoint, found.scheme, stored)
    if absent:
        note = f"the pack order {said!r} is not proven: {absent} is not stored as declared"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    wrong = {
        order: _first_fault(checkpoint, found, stored, source, order) for order in PACK_METHODS
    }
    right = [order for order, fault in wrong.items() if fault is None]
    if said in right:
        return Outcome(checkpoint=checkpoint)  # of several right ones, no other is any better
    if not right:
        said_wrong = "; ".join(f"as {order!r}: {fault}" for order, fault in wrong.items())
        raise CheckpointError(
            checkpoint.folder,
            f"its codes are the nearest rounding of {source.checkpoint.folder} under neither pack"
            f" order: {said_wrong}",
            fix="give the draft that it was made from, or quantize that again",
        )
    export = {**found.value["export"], "pack_method": right[0]}
    change = Repair(
        name="pack-order",
        wrong=f"pack_method {said!r}: the codes of the source lie in another order ({wrong[said]})",
        written=f"pack_method: {right[0]!r}, under which all codes of {len(stored.modules)}"
        " linears are the nearest rounding of the source",
    )
    declared = with_declaration(checkpoint, {**found.value, "export": export})
    return Outcome(checkpoint=declared, repairs=(change,))


def _undecodable(checkpoint: Checkpoint, scheme: DeclaredScheme, stored: StoredDraft) -> str | None:
    """The first tensor without which a linear cannot be decoded."""
    for row in stored.draft.linears():
        module = row.module
        if module not in stored.modules:
            continue
        rows, columns = row.tensor.shape
        for suffix, part in stored_parts(scheme, rows, columns).items():
            tensor = checkpoint.tensors.get(f"{module}.{suffix}")
            good = tensor and tensor.dtype in part.dtypes and tensor.shape == part.shape
            if not good and suffix not in BESIDE_CODES:
                return f"{module}.{suffix}"
    return None


def _first_fault(
    checkpoint: Checkpoint, found: Understood, stored: StoredDraft, source: Draft, order: PackMethod
) -> str | None:
    """The first linear whose codes, unpacked in this order, are not those of the source."""
    scheme = dataclasses.replace(found.scheme, pack_method=order)
    fault = not_nearest(source, checkpoint, scheme, stored.modules)
    return None if fault is None else str(fault)
