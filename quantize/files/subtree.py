"""A part of a checkpoint: the tensors below one prefix, as an MTP layer lies inside its target."""

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


def names_below(prefix: str, names: Collection[str], folder: Path) -> frozenset[str]:
    """Those names that begin with the prefix and a dot.

    Raises:
        CheckpointError: there are none.
    """
    below = frozenset(name for name in names if name.startswith(f"{prefix}."))
    if not below:
        there = mtp_layers(names)
        raise CheckpointError(
            folder,
            f"no tensor lies below {prefix!r} (--subtree)",
            fix=f"MTP layers of this folder: {', '.join(there)}"
            if there
            else "this folder has no MTP layer: give the one that has",
        )
    return below


def shards_of(below: Collection[str], index: Mapping[str, Any]) -> dict[str, Any]:
    """An index of these tensors alone: no other shard needs to be there."""
    weight_map = index["weight_map"]
    return {**index, "weight_map": {name: weight_map[name] for name in sorted(below)}}
