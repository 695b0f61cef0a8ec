"""Names that engines use for the linears of a draft: fused, and numbered after the target's.

Source: vLLM 0.33, where the layers of a draft are `model.layers.{N + i}` and N is the target's
number of layers; a language model is built below its own root and counts from 0.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ...recipes.errors import CheckpointError, PlanError
from ...recipes.schema import QUANTIZABLE
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from .engine_traits import fused_names
from .family import Draft, Family, Row


def first_layer(family: Family, target_layers: int | None) -> int | None:
    """Number in vLLM of a draft's first layer; None = it depends on the unknown target."""
    from_0 = family.served_root or family.engine_traits.vllm.counts_from_0
    return 0 if from_0 else target_layers


def excluded_modules(
    draft: Draft,
    kept: Collection[Row],
    quantized: Collection[Row],
    *,
    whole_names: bool,
    target_layers: int | None,
) -> tuple[str, ...]:
    """Names of the 2-D modules that stay floating-point, for the list of excludes.

    These are the names on disk, in decoder layers those of the fused linears, and what
    engines build whether the draft has it or not. `whole_names`: for a layout whose excludes are
    whole names, layers are numbered as in vLLM, and names begin as there; PlanError where that
    number is not known.
    """
    names = {row.module for row in kept}
    may_be = (row for row in quantized if row.role in QUANTIZABLE)
    as_codes = {name for row in may_be for name in (row.module, row.canonical_module, row.leaf)}
    unnamed = set(draft.family.served_unquantized) - as_codes
    unnamed -= {name.rpartition(".")[2] for name in names}
    names |= {draft.family.served_name(name) for name in names}
    if whole_names and (numbered := modules_in_layers(kept)):
        first = first_layer(draft.family, target_layers)
        if first is None:
            raise PlanError(
                "--target-layers",
                f"{', '.join(numbered)} would be kept, and this layout excludes whole names: vLLM"
                " numbers a draft's layers after the target's, whose number is not known",
                fix="give it (--target-layers 61), or use a layout with patterns"
                " (compressed-tensors)",
            )
        apart = (module.split(".", 2) for module in numbered)
        names |= {f"model.layers.{first + int(layer)}.{path}" for _, layer, path in apart}
    names |= {fused for name in names for fused in fused_names(name)} | unnamed
    if whole_names and draft.family.served_root:
        names |= {f"{draft.family.served_root}{name}" for name in names}
    return tuple(sorted(names))


def modules_in_layers(rows: Collection[Row]) -> tuple[str, ...]:
    """Canonical names of the rows that are linears of decoder layers."""
    names = (row.canonical_module for row in rows)
    return tuple(name for name in names if name.startswith("layers."))


def known_target_layers(checkpoint: Checkpoint, given: int | None) -> int | None:
    """The target's number of decoder layers: as given, or as in config.json; None = not known."""
    key = _target_layers_key(checkpoint.config)
    named = target_layers_named(checkpoint.config)
    if given is None:
        return named
    if not _counts(given):
        raise CheckpointError(
            "--target-layers",
            f"expected a whole number of at least 1, got {given!r}",
            fix="give num_hidden_layers of the target's config.json",
        )
    if named is not None and named != given:
        where = f"{checkpoint.folder / CONFIG_FILE}: {key}"
        raise CheckpointError(
            where,
            f"names a target of {named} decoder layers, --target-layers {given}",
            fix="leave the option out, or correct config.json",
        )
    return given


def target_layers_named(config: Mapping[str, Any]) -> int | None:
    """The target's number of decoder layers in a draft's config.json; None = not there."""
    named = config.get(_target_layers_key(config))
    return named if _counts(named) else None


def _target_layers_key(config: Mapping[str, Any]) -> str:
    if config.get("model_type") == "k3_dspark":  # vLLM 0.33 `k3_dspark.py`: the captured layers
        return "target_num_hidden_layers"
    modules = config.get("num_nextn_predict_layers")
    return "num_hidden_layers" if type(modules) is int and modules > 1 else "num_target_layers"


def _counts(value: Any) -> bool:
    return type(value) is int and value >= 1
