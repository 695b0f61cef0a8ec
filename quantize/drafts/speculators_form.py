"""How the speculators package spells the config of a kind of draft: what its families say of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .config_reader import ConfigReader


class SpeculatorsForm(NamedTuple):
    """One speculators_model_type.

    Attributes:
        architectures: as the package's config class names them, and as its `save_pretrained` does.
        spelled: makes of the config and its section of layers the keys as the family reads them.
    """

    architectures: tuple[str, ...]
    spelled: Callable[[ConfigReader, ConfigReader], dict[str, Any]]


def after_layer(keys: ConfigReader, key: str) -> list[int] | None:
    """Indices into transformers' `hidden_states`, where 0 is the embedding, as 0-based layers."""
    ids = keys.layer_ids(key)
    if ids is None:
        return None
    if ids[0] == 0:
        raise CheckpointError(
            keys.where,
            f"{key}: expected ids from 1 (the output of layer 0), got {list(ids)}",
            fix="a draft that reads the target's embedding is not supported",
        )
    return [i - 1 for i in ids]


def positive_keys(keys: ConfigReader, *names: str) -> dict[str, int]:
    """Those of the keys that are given."""
    return {name: keys.positive(name) for name in names if keys.config.get(name) is not None}
