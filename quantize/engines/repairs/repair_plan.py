"""`plan_repairs`: what is wrong with the JSON of a folder, and what would be written. Pure."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...drafts import Draft, read_draft
from ...drafts.runtime_names import known_target_layers
from ...errors import CheckpointError
from ...files.checkpoint import Checkpoint
from ...files.digests import tensor_digest
from ...lints import find_lints, fixed_config
from ...stored.declarations import HF_QUANT_CONFIG
from ...stored.stored_draft import StoredDraft
from ..contract import EngineName
from ..engine_check import check_checkpoint
from ..registry import choose
from .exclude_lists import repair_excludes
from .flat_declaration import repair_declaration
from .naming import repair_architecture, repair_draft_vocabulary
from .pack_order import repair_pack_order
from .repair import Outcome, Repair, with_config
from .side_files_and_index import repair_index, repair_side_file

Step = Callable[[Checkpoint], Outcome]
"""One kind of repair, of the folder as the repairs before it left its JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What repairing a folder would write.

    Attributes:
        source: the folder as it is.
        against: the draft that it was made from, None where none is given.
        config: its config.json as it is to be. files: other JSON files to write, by name.
        repairs: in the order in which they were found; empty where nothing can be repaired.
        notes: what is wrong, or not proven, and stays as it is.
    """

    source: Checkpoint
    against: Draft | None
    config: Mapping[str, Any]
    files: Mapping[str, Any]
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...]


def plan_repairs(
    folder: Path,
    *,
    engine: EngineName,
    version: str | None = None,
    target_layers: int | None = None,
    against: Path | None = None,
) -> RepairPlan:
    """Find what is wrong with the JSON of a folder. Only `against` makes it read tensor data.

    Args:
        folder: a draft, quantized or not.
        engine: whose name of the architecture is wanted; all else is right for every engine.
        version: of the engine; None = the newest that is known, as for one that is not.
        target_layers: decoder layers of the target; None = as config.json says, if it does.
        against: the BF16 draft that it was made from.

    Raises:
        CheckpointError: the folder is no checkpoint, its declaration is no object, `against` is
            another draft, or under no pack order are its codes those of `against`.
    """
    source = Checkpoint.open(folder)
    layers = known_target_layers(source, target_layers)
    draft = read_draft(Checkpoint.open(against)) if against is not None else None
    named = repair_architecture(source, choose(engine, version))
    try:
        named = _all(named, (repair_draft_vocabulary,))
        stored = StoredDraft.look(named.checkpoint)
    except CheckpointError as exc:
        note = f"the tensors are not those of a draft, so nothing else is repaired: {exc.what}"
        unread = dataclasses.replace(named, notes=(*named.notes, note))
        return _unspoilt(_plan(source, draft, unread), engine, version, layers)
    if draft is not None:
        _check_same_draft(source, stored, draft)
    steps = (
        partial(repair_declaration, stored=stored),
        partial(repair_excludes, stored=stored, target_layers=layers),
        partial(repair_pack_order, stored=stored, source=draft),
        repair_side_file,
        repair_index,
        partial(_repair_lints, stored=stored),
    )
    return _unspoilt(_plan(source, draft, _all(named, steps)), engine, version, layers)


def _unspoilt(
    plan: RepairPlan, engine: EngineName, version: str | None, layers: int | None
) -> RepairPlan:
    """No repairs where the engine refuses the folder, and would serve what they make of it wrongly.

    An error is seen, a silent fault is not.
    """
    known = choose(engine, version)
    after = dataclasses.replace(plan.source, config=plan.config)
    side_file = (plan.source.folder / HF_QUANT_CONFIG).is_file()
    for arch in known.archs if plan.repairs else ():
        asked = partial(
            check_checkpoint, engine=engine, version=version, arch=arch, target_layers=layers
        )
        try:
            before = asked(plan.source, has_side_file=side_file)
            served = asked(after, has_side_file=side_file or HF_QUANT_CONFIG in plan.files)
        except CheckpointError:
            continue  # of a folder that is no draft nothing is known
        if (before.verdict, served.verdict) == ("REFUSED", "LOADS BUT WRONG"):
            note = (
                f"nothing is written: {served.title} on {served.gpu} refuses the folder as it is,"
                f" and would serve the repaired one wrongly: {served.error}; {served.remedy}"
            )
            return dataclasses.replace(
                plan, config=plan.source.config, files={}, repairs=(), notes=(*plan.notes, note)
            )
    return plan


def _all(before: Outcome, steps: Iterable[Step]) -> Outcome:
    """One kind of repair after the other, each on what the last one left."""
    total = before
    for step in steps:
        found = step(total.checkpoint)
        total = Outcome(
            checkpoint=found.checkpoint,
            repairs=(*total.repairs, *found.repairs),
            notes=(*total.notes, *found.notes),
            files={**total.files, **found.files},
        )
    return total


def _plan(source: Checkpoint, against: Draft | None, total: Outcome) -> RepairPlan:
    return RepairPlan(
        source=source,
        against=against,
        config=total.checkpoint.config,
        files=total.files,
        repairs=total.repairs,
        notes=total.notes,
    )


def _repair_lints(checkpoint: Checkpoint, stored: StoredDraft) -> Outcome:
    """What `quantize --fix-config` would have written."""
    draft = dataclasses.replace(
        stored.draft,
        checkpoint=with_config(stored.draft.checkpoint, checkpoint.config),
    )
    lints = [lint for lint in find_lints(draft) if lint.fix]
    config = checkpoint.config
    for lint in lints:
        config = fixed_config(config, lint.fix)
    changes = tuple(
        Repair(name=lint.name, wrong=lint.cause, written=_keys(lint.fix)) for lint in lints
    )
    return Outcome(checkpoint=with_config(checkpoint, config), repairs=changes)


def _keys(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in changes.items())


def _check_same_draft(source: Checkpoint, stored: StoredDraft, draft: Draft) -> None:
    """What is not quantized has the bytes of the draft that it is said to be made from.

    Raises:
        CheckpointError: it has not.
    """
    where, fix = draft.checkpoint.folder, "give the BF16 draft that the folder was made from"
    here = {row.tensor.name: row for row in stored.draft.rows}
    there = {row.tensor.name: row for row in draft.rows}
    if stored.draft.family is not draft.family or here.keys() != there.keys():
        other = sorted(here.keys() ^ there.keys())
        what = f"{draft.family.name}, not {stored.draft.family.name}" if not other else other[0]
        raise CheckpointError(where, f"is another draft than {source.folder}: {what}", fix=fix)
    for name, row in there.items():
        ours = here[name].tensor
        if ours.shape != row.tensor.shape:
            got = f"{name} is {list(row.tensor.shape)}, not {list(ours.shape)}"
            raise CheckpointError(where, f"is another draft than {source.folder}: {got}", fix=fix)
        if name.removesuffix(".weight") in stored.modules:
            continue
        hashes = tensor_digest(source, ours), tensor_digest(draft.checkpoint, row.tensor)
        same = ours.dtype == row.tensor.dtype and hashes[0] == hashes[1]
        if not same:
            got = f"{name} has other values"
            raise CheckpointError(where, f"is another draft than {source.folder}: {got}", fix=fix)
