"""What engines are predicted to do with a layer in its target's folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..drafts.config_reader import with_text_config
from ..engines.contract import EngineCheck
from ..engines.engine_check import check_checkpoint
from ..errors import LayoutError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .conventions import Merged
from .layer_names import ENGINES

GOOD = ("LOADS", "UNKNOWN")


def predictions(
    target: Checkpoint,
    config: Mapping[str, Any],
    grafted: Sequence[TensorInfo],
    prefixes: Collection[str],
    merged: Merged | None,
    *,
    has_side_file: bool,
) -> tuple[EngineCheck, ...]:
    """One answer of each engine, by the declaration that the whole folder will have.

    Args:
        target: its folder, named in errors.
        merged: what was declared, and which engine cannot read it so.

    Raises:
        LayoutError: no engine loads the layer.
    """
    inside = Checkpoint(
        folder=target.folder,
        config=config,
        tensors={tensor.name: tensor for tensor in grafted},
        headers={},
        index=None,
        subtree=",".join(prefixes),
    )
    layers = with_text_config(config).get("num_hidden_layers")
    found = []
    for engine in ENGINES:
        check = check_checkpoint(
            inside, engine=engine, target_layers=layers, has_side_file=has_side_file
        )
        why = merged.cannot.get(engine) if merged else None
        if why is not None and check.verdict in GOOD:
            check = replace(check, verdict="REFUSED", error=f"{check.title}: {why}", remedy=None)
        found.append(check)
    if not any(check.verdict in GOOD for check in found):
        why = "; ".join(f"{check.title}: {check.error}" for check in found)
        raise LayoutError(
            "graft",
            f"no engine would load the layer in this target: {why}",
            fix=next((check.remedy for check in found if check.remedy), "graft it unquantized"),
        )
    return tuple(found)
