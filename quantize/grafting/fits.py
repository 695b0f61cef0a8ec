"""Whether a layer is one of this target: the same sizes, the next number, the same tables."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..drafts import read_config
from ..drafts.config_reader import with_text_config
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import tensor_digest
from ..files.hub import DraftSource
from ..files.safetensors_header import TensorInfo
from ..files.subtree import mtp_layers
from ..stored.stored_draft import StoredDraft

_EMBEDDING, _HEAD = _TABLES = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of what a layer's folder may have beside it, which is the target's."""
_WEIGHT = "weight"


def layer_prefixes(stored: StoredDraft, source: DraftSource) -> tuple[str, ...]:
    """The prefixes of the MTP layers of a folder.

    Raises:
        CheckpointError: it has none, or is a whole model of which no layer was chosen.
    """
    names = stored.checkpoint.tensors
    if source.subtree is not None:
        return tuple(sorted(source.subtree.split(",")))
    found = mtp_layers(names)
    if not found:
        raise CheckpointError(
            source.folder,
            f"no MTP layer stands here: it is a draft of family {stored.draft.family.name}",
            fix="give the folder that `draftquant quantize TARGET --subtree ...` wrote",
        )
    others = [n for n in _outside(names, found) if not n.endswith(_TABLES)]
    if others:
        raise CheckpointError(
            source.folder,
            f"it holds more than an MTP layer: {others[0]}",
            fix=f"name what goes in: --subtree {','.join(found)}",
        )
    return found


def _outside(names: Iterable[str], prefixes: Collection[str]) -> list[str]:
    starts = tuple(f"{prefix}." for prefix in prefixes)
    return [name for name in names if not name.startswith(starts)]


def check_free(
    target: Checkpoint, names: Collection[str], prefixes: Collection[str], *, replace: bool
) -> frozenset[str]:
    """The target's tensors that the layer takes the place of.

    Args:
        names: of all its tensors, as they are stored.
        replace: they may go.

    Raises:
        CheckpointError: there are some, and they may not go; or its layer has another name.
    """
    there = frozenset(names) - frozenset(_outside(names, prefixes))
    if there and not replace:
        raise CheckpointError(
            target.folder,
            f"the target has this layer already: {len(there)} tensors below {', '.join(prefixes)},"
            f" such as {min(there)}",
            fix="add --replace to put the other one in its place, in a new folder: the target"
            " itself stays as it is",
        )
    return there


def check_tables(
    target: Checkpoint, stored: StoredDraft, prefixes: Collection[str]
) -> frozenset[str]:
    """The layer's folder's own copies of embedding and head, which the target has.

    A head whose target has none is held against the target's embedding, to which it is tied.

    Raises:
        CheckpointError: one is not the target's, or the target has none.
    """
    own = stored.checkpoint
    left_out = frozenset(_outside(own.tensors, prefixes))
    for name in sorted(left_out):
        mine, whole = own.tensors[name], _of_target(target, name)
        if whole is None:
            raise CheckpointError(
                own.folder,
                f"{name} would be left out, and the target {target.folder} has no such table",
                fix="graft the layer into the target that it was taken from",
            )
        if mine.dtype != whole.dtype and mine.shape == whole.shape:
            continue  # the target's is quantized, and the layer's was not
        if whole.name.rpartition(".")[2] != _WEIGHT:
            continue  # likewise, and packed
        if mine.shape != whole.shape or tensor_digest(own, mine) != tensor_digest(target, whole):
            raise CheckpointError(
                own.folder,
                f"{name} is not the target's: {_said(mine)} here, {_said(whole)} there"
                f" ({whole.name}), or other values",
                fix="graft the layer into the target that it was taken from; where the target was"
                " trained on, take the layer from the same version",
            )
    return left_out


def _of_target(target: Checkpoint, name: str) -> TensorInfo | None:
    """The target's table of this name, however its text model is called; quantized, or tied."""
    if name in target.tensors:
        return target.tensors[name]
    table = next(end for end in _TABLES if name.endswith(end))
    for end in (table, _EMBEDDING):
        module = end.rpartition(".")[0]
        found = [
            tensor
            for other, tensor in sorted(target.tensors.items())
            if f".{module}." in f".{other}" and ".layers." not in other
        ]
        plain = [tensor for tensor in found if tensor.name.endswith(end)]
        if found:
            return (plain or found)[0]
    return None


def _said(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_fits(target: Checkpoint, config: Mapping[str, Any], stored: StoredDraft) -> None:
    """By the target's config.json the layer is what it is by its own.

    Args:
        config: its config.json, with the layer counted.

    Raises:
        CheckpointError: it belongs to another target, by which key.
    """
    draft = stored.draft
    inside = dataclasses.replace(draft.checkpoint, config=config, folder=target.folder)
    family, geometry = read_config(inside)
    if family.name != draft.family.name:
        raise CheckpointError(
            target.folder / CONFIG_FILE,
            f"is the config.json of a target whose MTP layer is {family.name}; the layer is"
            f" {draft.family.name}",
            fix="graft the layer into the target that it was taken from",
        )
    for name, there in _sizes(geometry).items():
        here = _sizes(draft.geometry).get(name)
        if there != here and name != "num_layers":
            raise CheckpointError(
                stored.checkpoint.folder / CONFIG_FILE,
                f"{name}: the layer has {here}, the target {target.folder} {there}",
                fix="this is the layer of another target: graft it into the one that it was taken"
                " from",
            )


def _sizes(geometry: Any) -> dict[str, Any]:
    return {each.name: getattr(geometry, each.name) for each in dataclasses.fields(geometry)}


def check_numbers(target: Checkpoint, stored: StoredDraft, prefixes: Collection[str]) -> None:
    """Layers that are numbered after the target's follow its last one.

    Raises:
        CheckpointError: they do not.
    """
    layer = stored.draft.family.layer
    if layer is None or not layer.groups:
        return
    found = sorted(int(match[1]) for p in prefixes if (match := layer.match(f"{p}.")))
    layers = with_text_config(target.config).get("num_hidden_layers")
    inside = with_text_config(stored.checkpoint.config).get("num_hidden_layers")
    if layers == inside and all(type(layers) is int and number >= layers for number in found):
        return
    raise CheckpointError(
        stored.checkpoint.folder,
        f"the layer is number {', '.join(map(str, found))}; the target has {layers} decoder layers,"
        f" after which engines look for layer {layers}",
        fix="graft the layer into the target that it was taken from",
    )
