"""What config.json says of the target's own linears is what it said before the graft."""

import re
from collections.abc import Collection, Iterator, Mapping
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
_OF_LINEARS = frozenset(
    {
        "config_groups",
        "exclude",
        "exclude_modules",
        "format",
        "ignore",
        "ignored_layers",
        "layer_quant_config",
        "modules_to_not_convert",
        "quantized_layers",
    }
)
"""Keys of a declaration that say how linears are stored: a graft adds the layer's."""
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

    Returns:
        The faults; and whether both declarations were understood.
    """
    faults = [*_other_keys(before, after)]
    try:
        was_of = _scheme(before)
    except DraftQuantError:
        return faults, False
    try:
        now_of = _scheme(after)
        for module in _modules(own):
            was, now = _meant(was_of, module), _meant(now_of, module)
            if was != now:
                faults.append(Fault(where=f"declaration of {module}", expected=was, got=now))
    except DraftQuantError as exc:
        faults.append(Fault(where=str(exc.where), expected="what is understood", got=exc.what))
    return faults, True


def _other_keys(before: Checkpoint, after: Checkpoint) -> Iterator[Fault]:
    """What the target declares besides its linears: a graft leaves it as it is."""
    try:
        was, now = raw_declaration(before), raw_declaration(after)
    except DraftQuantError as exc:
        yield Fault(where=str(exc.where), expected="a declaration", got=exc.what)
        return
    if was is None or not isinstance(was.value, Mapping):
        return
    if now is None or not isinstance(now.value, Mapping):
        got = "none" if now is None else repr(now.value)
        yield Fault(where="quantization_config", expected="the target's", got=got)
        return
    for key in sorted((was.value.keys() | now.value.keys()) - _OF_LINEARS):
        here, there = was.value.get(key), now.value.get(key)
        if here != there:
            where = f"quantization_config: {key}"
            yield Fault(where=where, expected=repr(here), got=repr(there))


def _modules(own: Mapping[str, TensorInfo]) -> Collection[str]:
    """Of the target's linears, one expert for all of its layer."""
    modules: dict[str, str] = {}
    for name, tensor in own.items():
        if len(tensor.shape) == 2:
            module = name.rpartition(".")[0]
            modules.setdefault(_EXPERT.sub(".experts.*.", module), module)
    return modules.values()


def _scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness="declaration")


def _meant(scheme: DeclaredScheme | None, module: str) -> str:
    if scheme is None or scheme.is_excluded(module):
        return "floats"
    found = scheme.of(module)
    return "floats" if found is None else str(found).partition(";")[0]
