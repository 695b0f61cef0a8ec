"""A part of a checkpoint: the tensors below some prefixes, as MTP layers lie inside a target."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_MTP = re.compile(r"(.*\.eh_proj|model\.mtp_layers\.\d+\.input_proj|mtp\.fc)\.weight")
"""The linear that an MTP layer reads the embedding and the state with, and no other layer has."""


def mtp_layers(names: Collection[str]) -> tuple[str, ...]:
    """The prefixes of the MTP layers among the tensors of a target, sorted."""
    found = (name.rsplit(".", 2)[0] for name in names if _MTP.fullmatch(name))
    return tuple(sorted(set(found)))


def names_below(subtree: str, names: Collection[str], folder: Path) -> frozenset[str]:
    """Those names that begin with a prefix and a dot.

    Args:
        subtree: the prefix, or several with commas between them.

    Raises:
        CheckpointError: there are none below one of the prefixes.
    """
    found: set[str] = set()
    for prefix in subtree.split(","):
        below = {name for name in names if name.startswith(f"{prefix}.")}
        _check_below(prefix, below, names, folder)
        found |= below
    return frozenset(found)


def _check_below(prefix: str, below: Collection[str], names: Collection[str], folder: Path) -> None:
    if not below:
        there = mtp_layers(names)
        raise CheckpointError(
            folder,
            f"no tensor lies below {prefix!r} (--subtree)",
            fix=f"give one of the MTP layers of this folder: {', '.join(there)}"
            if there
            else "this folder has no MTP layer: give the one that has",
        )


def shards_of(below: Collection[str], index: Mapping[str, Any]) -> dict[str, Any]:
    """An index of these tensors alone: no other shard needs to be there."""
    weight_map = index["weight_map"]
    return {**index, "weight_map": {name: weight_map[name] for name in sorted(below)}}
