"""The declaration: a quant_method that is missing or unknown, ModelOpt's nested form."""

import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....recipes.schema import LayoutName
from ...errors import CheckpointError, VerifyError
from ...files.checkpoint import Checkpoint
from ...layouts import get_layout
from ...layouts.modelopt import flat_form
from ...stored.declarations import (
    NO_MEANING,
    READERS,
    DeclaredScheme,
    ObjectReader,
    RawDeclaration,
    raw_declaration,
)
from ...stored.declarations.scheme import check_patterns
from ...stored.parts import COMPANIONS, stored_parts
from ..registry import ENGINES
from .repair import Outcome, Repair, Stored, with_declaration

_LAYOUTS: tuple[LayoutName, ...] = typing.get_args(LayoutName)


class Understood(NamedTuple):
    """A declaration of config.json in its flat form; `scheme` has no excludes."""

    layout: LayoutName
    value: Mapping[str, Any]
    scheme: DeclaredScheme


def understood(checkpoint: Checkpoint) -> Understood | None:
    """The declaration, whatever its excludes say; None where it is none of those known here."""
    raw = raw_declaration(checkpoint)
    if raw is None or raw.form != "flat" or not isinstance(raw.value, dict):
        return None
    layout = _layout_of(raw)
    scheme = _scheme(raw, layout) if layout is not None else None
    if layout is None or not isinstance(scheme, DeclaredScheme):
        return None
    return Understood(layout, raw.value, scheme)


def strictly_read(checkpoint: Checkpoint) -> DeclaredScheme:
    """The declaration of config.json with its excludes.

    Raises:
        VerifyError: it is not understood.
    """
    raw = raw_declaration(checkpoint)
    assert raw is not None
    keys = ObjectReader.of(raw.value, raw.where, raw.key, ignored=NO_MEANING | {"quant_method"})
    scheme = READERS[raw.value["quant_method"]](keys)
    keys.finish()
    check_patterns(keys, scheme)
    return scheme


def repair_declaration(checkpoint: Checkpoint, stored: Stored) -> Outcome:
    """Write a flat declaration with the quant_method that keys and tensors leave possible.

    Raises:
        CheckpointError: the declaration is no object, or hf_quant_config.json is not JSON.
    """
    raw = raw_declaration(checkpoint)
    if raw is None:
        codes = f"{len(stored.modules)} linears are stored as codes, and nothing declares how"
        return Outcome(checkpoint=checkpoint, notes=(codes,) if stored.modules else ())
    if not isinstance(raw.value, dict) or not raw.value:
        raise CheckpointError(
            raw.where,
            f"quantization_config: expected an object with quant_method, got {raw.value!r}",
            fix="quantize the draft again",
        )
    if raw.form != "flat":
        return _flattened(checkpoint, raw)
    method, layout = raw.value.get("quant_method"), _layout_of(raw)
    if layout is not None:
        scheme = _scheme(raw, layout)
        notes = (_not_understood(scheme),) if isinstance(scheme, VerifyError) else ()
        return Outcome(checkpoint=checkpoint, notes=notes)
    if isinstance(method, str) and any(method in engine.methods for engine in ENGINES.values()):
        note = f"the quant_method {method!r} is not understood here: nothing of it is repaired"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    return _inferred(checkpoint, raw, stored)


def _flattened(checkpoint: Checkpoint, raw: RawDeclaration) -> Outcome:
    scheme = _scheme(raw, "modelopt")
    if isinstance(scheme, VerifyError):
        return Outcome(checkpoint=checkpoint, notes=(_not_understood(scheme),))
    wrong = {
        "nested": "config.json has ModelOpt's nested form without quant_method: SGLang reads none"
        " of its excludes",
        "side file": "hf_quant_config.json alone declares the quantization: config.json says"
        " nothing",
    }[raw.form]
    declared = flat_form(raw.value["quant_algo"], list(_listed(raw.value)))
    if "producer" in raw.value:
        declared["producer"] = raw.value["producer"]
    found = Repair(
        name="declaration",
        wrong=wrong,
        written="quantization_config in the flat form, quant_method 'modelopt'",
    )
    return Outcome(checkpoint=with_declaration(checkpoint, declared), repairs=(found,))


def _listed(declared: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts among ModelOpt's excludes; what is no list of texts is repaired as excludes."""
    listed = declared.get("exclude_modules", declared.get("ignore"))
    return tuple(p for p in listed if isinstance(p, str)) if isinstance(listed, list) else ()


def _inferred(checkpoint: Checkpoint, raw: RawDeclaration, stored: Stored) -> Outcome:
    said = raw.value.get("quant_method")
    wrong = "quant_method is missing" if said is None else f"no engine has quant_method {said!r}"
    schemes = {layout: _scheme(raw, layout) for layout in _LAYOUTS}
    fitting = [
        layout
        for layout, scheme in schemes.items()
        if not isinstance(scheme, VerifyError) and _fits(scheme, checkpoint, stored)
    ]
    if len(fitting) != 1:
        which = f"several fit: {', '.join(fitting)}" if fitting else "none fits keys and tensors"
        return Outcome(checkpoint=checkpoint, notes=(f"{wrong}, and {which}",))
    declared = {**raw.value, "quant_method": fitting[0]}
    found = Repair(
        name="quant-method",
        wrong=f"{wrong}: engines do not read the declaration",
        written=f"quant_method: {fitting[0]!r}, which alone fits the other keys and the tensors",
    )
    return Outcome(checkpoint=with_declaration(checkpoint, declared), repairs=(found,))


def _layout_of(raw: RawDeclaration) -> LayoutName | None:
    """The layout that the declaration names; quant_methods are named as layouts are."""
    return next((name for name in _LAYOUTS if name == raw.value.get("quant_method")), None)


def _scheme(raw: RawDeclaration, layout: LayoutName) -> DeclaredScheme | VerifyError:
    """The declaration read as `layout`, its excludes left out; else why it is not understood."""
    excludes = get_layout(layout).exclude_keys
    value = {key: item for key, item in raw.value.items() if key not in excludes}
    keys = ObjectReader.of(value, raw.where, raw.key, ignored=NO_MEANING | {"quant_method"})
    try:
        scheme = READERS[layout](keys)
        keys.finish()
    except VerifyError as exc:
        return exc
    return scheme


def _fits(scheme: DeclaredScheme, checkpoint: Checkpoint, stored: Stored) -> bool:
    """Every quantized linear is stored with exactly the tensors of the scheme."""
    rows = {row.module: row for row in stored.draft.linears()}
    for module in stored.modules:
        if module not in rows:
            return False
        found = {s: checkpoint.tensors.get(f"{module}.{s}") for s in {*COMPANIONS, "weight"}}
        there = {suffix: tensor for suffix, tensor in found.items() if tensor is not None}
        out_features, in_features = rows[module].tensor.shape
        parts = stored_parts(scheme, out_features, in_features)
        if there.keys() != parts.keys() or any(
            there[suffix].dtype not in part.dtypes or there[suffix].shape != part.shape
            for suffix, part in parts.items()
        ):
            return False
    return bool(stored.modules)


def _not_understood(exc: VerifyError) -> str:
    return f"the declaration is not understood, and nothing of it is repaired: {exc.what}"
