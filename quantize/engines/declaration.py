"""What a folder declares, as engines read it: raw, so that no declaration is an error here.

An engine takes the keys that it knows: what this package's strict reader rejects is read again by
`declared_forms`; what that does not know either is UNKNOWN, unless the engine refuses its method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...recipes.errors import CheckpointError, VerifyError, short
from ..files.checkpoint import Checkpoint
from ..stored.layouts import LAYOUTS
from ..stored.layouts.declaration_reader import ObjectReader
from ..stored.stored_declaration import Form, RawDeclaration, read_scheme, written_declaration
from .declared_forms import READERS
from .linear_scheme import Group, NotReadError, of_declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A `quantization_config`, or the hf_quant_config.json where there is none.

    Attributes:
        method: its quant_method; None where the key is missing, of which an engine may still take
            it for ModelOpt's.
        form: how it is written. algorithm: ModelOpt's quant_algo.
        layout: the quant_method by whose rule excludes are held against names; None where it is
            not understood.
        groups: which linears are stored how; none where it is not understood: `problem` says why.
        exclude_remedy: what to do about excludes where the engine reads none of them.
        spelled: the quant_method before the engine took it for another one.
    """

    method: str | None
    form: Form
    algorithm: str | None
    by_modelopt: bool
    keys: Mapping[str, Any]
    layout: str | None
    groups: tuple[Group, ...]
    excludes: tuple[str, ...]
    problem: str | None
    exclude_remedy: str | None = None
    spelled: str | None = None

    @property
    def cache_dtype(self) -> str | None:
        """An engine's option for a draft's KV cache, as four layouts say it; None = no FP8."""
        export, scheme = self.keys.get("export"), self.keys.get("kv_cache_scheme")
        named = self.keys.get("kv_cache_quant_algo") == "FP8" or scheme == "static"
        if isinstance(scheme, Mapping):
            named = named or (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        if isinstance(export, Mapping):
            named = named or bool(export.get("kv_cache_group"))
        return "fp8" if named else None

    @property
    def signature(self) -> str | None:
        """As a key of schemes.toml; None where it is not understood or there are several."""
        found = {group.scheme.signature for group in self.groups}
        return found.pop() if len(found) == 1 else None


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing. What is no object that says anything is refused."""
    found = written_declaration(checkpoint)
    if found is None:
        return None
    raw = found.value
    if not isinstance(raw, dict):
        raise CheckpointError(
            found.where,
            f"quantization_config: expected an object with quant_method, got {short(raw)}",
            fix="remove it, or quantize the draft again",
        )
    algorithm, producer = raw.get("quant_algo"), raw.get("producer")
    method = raw.get("quant_method") if found.has_method else None
    said = _understood(found, method or ("modelopt" if algorithm else None))
    return Declaration(
        method=None if method is None else str(method),
        form=found.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        keys=raw,
        layout=said.layout,
        groups=said.groups,
        excludes=said.excludes,
        problem=said.problem,
    )


class _Understood(NamedTuple):
    layout: str | None = None
    groups: tuple[Group, ...] = ()
    excludes: tuple[str, ...] = ()
    problem: str | None = None


def _understood(found: RawDeclaration, method: object) -> _Understood:
    """As this package decodes it, else as engines take it besides."""
    if not isinstance(method, str):
        return _Understood()
    layout = LAYOUTS.get(method)
    if layout is None:
        return _beyond(found, method)
    try:
        scheme = read_scheme(found, layout=layout, strictness="engine")
        groups = tuple(Group(e.targets, of_declared(e)) for e in (scheme, *scheme.others))
        return _Understood(layout.name, groups, scheme.excludes)
    except VerifyError as exc:
        problem = " ".join(str(exc).split())
    try:
        keys = ObjectReader.of(found.value, found.where, found.key, strictness="engine")
        excludes = layout.excludes(keys)
        return _Understood(layout.name, READERS[layout.name](found.value), excludes)
    except (KeyError, NotReadError, VerifyError):
        return _Understood(problem=problem)


def _beyond(found: RawDeclaration, method: str) -> _Understood:
    """A quant_method that this package does not decode, and whose excludes engines read in keys."""
    reader = READERS.get(method)
    if reader is None:
        return _Understood()
    try:
        return _Understood(method, reader(found.value))
    except NotReadError as exc:
        return _Understood(problem=f"{method}: {exc}")
