"""The declaration: a quant_method that is missing or unknown, ModelOpt's nested form."""

import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....recipes.schema import LayoutName
from ...errors import CheckpointError, VerifyError
from ...files.checkpoint import Checkpoint
from ...layouts.modelopt_layout import flat_form
from ...stored.declarations import (
    DeclaredScheme,
    RawDeclaration,
    raw_declaration,
    read_scheme,
)
from ...stored.layouts import LAYOUTS, StoredLayout
from ...stored.parts import COMPANIONS, stored_parts
from ...stored.stored_draft import StoredDraft
from ..registry import ENGINES
from .repair import Outcome, Repair, with_config, with_declaration

_LAYOUTS: tuple[LayoutName, ...] = typing.get_args(LayoutName)


class Understood(NamedTuple):
    """A declaration of config.json in its flat form; `scheme` has no excludes."""

    value: Mapping[str, Any]
    scheme: DeclaredScheme

    @property
    def layout(self) -> LayoutName:
        """The name of its layout, which is one of `LAYOUTS`."""
        return next(name for name in _LAYOUTS if name == self.scheme.layout.name)


def understood(checkpoint: Checkpoint) -> Understood | None:
    """The declaration, whatever its excludes say; None where it is none of those known here."""
    raw = raw_declaration(checkpoint)
    if raw is None or raw.form != "flat" or not isinstance(raw.value, dict):
        return None
    layout = _layout_of(raw)
    scheme = _scheme(raw, layout) if layout is not None else None
    return Understood(raw.value, scheme) if isinstance(scheme, DeclaredScheme) else None


def strictly_read(checkpoint: Checkpoint) -> DeclaredScheme:
    """The declaration of config.json with its excludes.

    Raises:
        VerifyError: it is not understood.
    """
    raw = raw_declaration(checkpoint)
    assert raw is not None
    return read_scheme(raw, strictness="declaration")


def repair_declaration(checkpoint: Checkpoint, stored: StoredDraft) -> Outcome:
    """Write a flat declaration with the quant_method that keys and tensors leave possible.

    Raises:
        CheckpointError: the declaration is no object, or hf_quant_config.json is not JSON.
    """
    spelled = _usual_spelling(checkpoint, stored)
    if spelled is not None:
        return spelled
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
    if isinstance(method, str) and any(
        method in engine.declaration.methods for engine in ENGINES.values()
    ):
        note = f"the quant_method {method!r} is not understood here: nothing of it is repaired"
        return Outcome(checkpoint=checkpoint, notes=(note,))
    return _inferred(checkpoint, raw, stored)


def _usual_spelling(checkpoint: Checkpoint, stored: StoredDraft) -> Outcome | None:
    """A declaration under a key or a quant_method that only some read, or one that says nothing."""
    config = checkpoint.config
    declared, other = config.get("quantization_config"), config.get("compression_config")
    if declared is None and isinstance(other, Mapping):
        rest = {key: value for key, value in config.items() if key != "compression_config"}
        found = Repair(
            name="declaration",
            wrong="the declaration stands under compression_config, where few look for it",
            written="the same under quantization_config",
        )
        moved = with_config(checkpoint, {**rest, "quantization_config": other})
        return Outcome(checkpoint=moved, repairs=(found,))
    if declared == {} and not stored.modules:
        rest = {key: value for key, value in config.items() if key != "quantization_config"}
        found = Repair(
            name="declaration",
            wrong="quantization_config is empty, which SGLang refuses",
            written="no quantization_config: no linear is stored as codes",
        )
        return Outcome(checkpoint=with_config(checkpoint, rest), repairs=(found,))
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    usual = {
        name: to for engine in ENGINES.values() for name, to in engine.declaration.aliases.items()
    }
    if isinstance(declared, Mapping) and isinstance(method, str) and method in usual:
        found = Repair(
            name="quant-method",
            wrong=f"quant_method {method!r} is a spelling that only some engines take",
            written=f"quant_method: {usual[method]!r}",
        )
        renamed = {**declared, "quant_method": usual[method]}
        return Outcome(checkpoint=with_declaration(checkpoint, renamed), repairs=(found,))
    return None


def _flattened(checkpoint: Checkpoint, raw: RawDeclaration) -> Outcome:
    scheme = _scheme(raw, LAYOUTS["modelopt"])
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


def _inferred(checkpoint: Checkpoint, raw: RawDeclaration, stored: StoredDraft) -> Outcome:
    said = raw.value.get("quant_method")
    wrong = "quant_method is missing" if said is None else f"no engine has quant_method {said!r}"
    schemes = {name: _scheme(raw, LAYOUTS[name]) for name in _LAYOUTS}
    fitting = [
        name
        for name, scheme in schemes.items()
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


def _layout_of(raw: RawDeclaration) -> StoredLayout | None:
    """The layout that the declaration names; quant_methods are named as layouts are."""
    method = raw.value.get("quant_method")
    return LAYOUTS.get(method) if isinstance(method, str) else None


def _scheme(raw: RawDeclaration, layout: StoredLayout) -> DeclaredScheme | VerifyError:
    """The declaration read as `layout`, its excludes left out; else why it is not understood."""
    try:
        return read_scheme(raw, layout=layout, strictness="codes")
    except VerifyError as exc:
        return exc


def _fits(scheme: DeclaredScheme, checkpoint: Checkpoint, stored: StoredDraft) -> bool:
    """Every quantized linear is stored with exactly the tensors of the scheme."""
    rows = {row.module: row for row in stored.draft.linears()}
    for module in stored.modules:
        if module not in rows:
            return False
        found = {s: checkpoint.tensors.get(f"{module}.{s}") for s in {*COMPANIONS, "weight"}}
        there = {suffix: tensor for suffix, tensor in found.items() if tensor is not None}
        out_features, in_features = rows[module].tensor.shape
        own = scheme.of(module)
        parts = stored_parts(own, out_features, in_features) if own else {}
        if there.keys() != parts.keys() or any(
            there[suffix].dtype not in part.dtypes or there[suffix].shape != part.shape
            for suffix, part in parts.items()
        ):
            return False
    return bool(stored.modules)


def _not_understood(exc: VerifyError) -> str:
    return f"the declaration is not understood, and nothing of it is repaired: {exc.what}"
