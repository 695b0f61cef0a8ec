"""What a folder declares, as engines read it: raw, so that no declaration is an error here.

`stored.declarations` understands a declaration or rejects it. An engine does neither: it takes the
keys that it knows. So a declaration that the strict reader rejects has no scheme here, and a
verdict of UNKNOWN, unless the engine refuses it by its quant_method.
"""

from dataclasses import dataclass

from ...recipes.errors import short
from ..errors import CheckpointError, VerifyError
from ..files.checkpoint import Checkpoint
from ..stored.declarations import (
    DeclaredScheme,
    Form,
    RawDeclaration,
    raw_declaration,
    read_scheme,
)
from ..stored.layouts import LAYOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A `quantization_config`, or the hf_quant_config.json where there is none.

    Attributes:
        method: its quant_method as written; None where the key is missing. An engine may still take
            it for ModelOpt's: see `Engine.taken`.
        form: how it is written. algorithm: ModelOpt's quant_algo. by_modelopt: it names ModelOpt as
            its producer.
        scheme: None where it is not understood; `problem` says why.
        lists_excludes: whether it has a list of excludes at all.
        exclude_remedy: what to do about excludes where the engine reads none of them.
    """

    method: str | None
    form: Form
    algorithm: str | None
    by_modelopt: bool
    scheme: DeclaredScheme | None
    problem: str | None
    lists_excludes: bool
    exclude_remedy: str | None = None

    @property
    def signature(self) -> str | None:
        """The scheme as a key of the engines' tables, such as "quark int4 group128 none"."""
        if self.scheme is None:
            return None
        s = self.scheme
        parts = [s.layout.name, s.weight_dtype.removesuffix("_e4m3")]
        if s.weight_dtype in ("int4", "fp8_e4m3"):
            size = s.group_size if s.granularity == "group" else None
            parts.append(f"{s.granularity}{size or ''}{'+fp8' if s.first_stage else ''}")
        return " ".join([*parts, s.activations])


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing.

    Raises:
        CheckpointError: hf_quant_config.json is not readable as JSON, or quantization_config is no
            object that says anything.
    """
    found = raw_declaration(checkpoint)
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
    lists = any(raw.get(key) for key in ("exclude", "ignore", "modules_to_not_convert"))
    try:
        scheme, problem = _read(found, method or ("modelopt" if algorithm else None)), None
    except VerifyError as exc:
        scheme, problem = None, " ".join(str(exc).split())
    return Declaration(
        method=None if method is None else str(method),
        form=found.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        scheme=scheme,
        problem=problem,
        lists_excludes=lists,
    )


def _read(found: RawDeclaration, method: object) -> DeclaredScheme | None:
    layout = LAYOUTS.get(method) if isinstance(method, str) else None
    return None if layout is None else read_scheme(found, layout=layout, strictness="engine")
