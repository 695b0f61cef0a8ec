"""What config.json says of the target's own linears is what it said before the graft."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...recipes.errors import DraftQuantError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import raw_declaration, read_scheme
from ..stored.layouts import DeclaredScheme
from .verify_report import Fault

_MAY_CHANGE = frozenset(
    {"quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"}
)
_EXPERT = re.compile(r"\.experts\.\d+\.")


def config_faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Fault]:
    """Keys of config.json that a graft has no business with."""
    for key in sorted(before.keys() | after.keys()):
        here, there = before.get(key), after.get(key)
        if key == "text_config" and isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from config_faults(here, there)
        elif key not in _MAY_CHANGE and here != there:
            yield Fault(where=f"config.json: {key}", expected=repr(here), got=repr(there))


def declaration_faults(
    before: Checkpoint, after: Checkpoint, own: Mapping[str, TensorInfo]
) -> tuple[list[Fault], bool]:
    """Whether each linear of the target is declared as it was.

    Args:
        before: the target.
        after: the folder with the layer.
        own: the target's tensors.

    Returns:
        The faults; and whether both declarations were understood.
    """
    try:
        schemes = [_scheme(each) for each in (before, after)]
        modules: dict[str, str] = {}
        for name, tensor in own.items():
            if len(tensor.shape) == 2:
                module = name.rpartition(".")[0]
                modules.setdefault(_EXPERT.sub(".experts.*.", module), module)
        faults = []
        for module in modules.values():
            was, now = (_meant(scheme, module) for scheme in schemes)
            if was != now:
                faults.append(Fault(where=f"declaration of {module}", expected=was, got=now))
    except DraftQuantError:
        return [], False
    return faults, True


def _scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness="declaration")


def _meant(scheme: DeclaredScheme | None, module: str) -> str:
    if scheme is None or scheme.is_excluded(module):
        return "floats"
    found = scheme.of(module)
    return "floats" if found is None else str(found).partition(";")[0]
