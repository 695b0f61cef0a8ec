"""Where a folder declares its quantization, and which tensors a linear then has.

Reading is strict: a declaration that is not understood is an error, never a guess. ModelOpt 0.47
writes hf_quant_config.json, `{"producer": ..., "quantization": {"quant_algo": ...}}`; its exporter
of drafts puts the same object into config.json, without quant_method. That nested form is converted
to its flat one.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...recipes.errors import DeclarationError
from ...recipes.regular_file import check_own
from ..drafts.architectures import packed_by_mlx
from ..files.checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from ..files.safetensors_header import TensorInfo
from .layouts import HF_QUANT_CONFIG, READ_LAYOUTS
from .layouts.declaration_reader import OTHER_WAY, UNREAD_METHODS, ObjectReader, Strictness
from .layouts.module_patterns import PatternProblem, no_pattern, understood
from .layouts.scheme import FLOAT_DTYPES, FP8_DTYPE, DeclaredScheme, Parts

COMPANIONS: frozenset[str] = frozenset().union(*(each.companions for each in READ_LAYOUTS.values()))
"""Suffixes that only a quantized linear has."""
ZERO_POINTS: Mapping[str, int] = {
    suffix: byte for each in READ_LAYOUTS.values() for suffix, byte in each.zero_points.items()
}
"""Every byte of the zero points of symmetric codes; AWQ's are two nibbles of 8."""
INVERSE_INPUT_SCALE = "input_global_scale"
"""NVFP4's in compressed-tensors: it divides."""
INPUT_SCALES = ("input_scale", INVERSE_INPUT_SCALE)
"""Static scales of a linear's input: one of the two."""
_BESIDE_CODES = frozenset({*INPUT_SCALES, *ZERO_POINTS, "weight_shape"})
"""Tensors that decoding symmetric codes does not need."""
_PACKED_DTYPES = (FP8_DTYPE, "I32", "U8")


def stored_parts(
    scheme: DeclaredScheme,
    out_features: int,
    in_features: int,
    source_dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> Parts:
    """The tensors of a linear by suffix ("weight", "weight_scale", ...).

    INT4 scales may have `source_dtypes` besides F16: that of the weight before quantization.
    """
    dtypes = tuple(dict.fromkeys((*source_dtypes, "F16")))
    parts = scheme.layout.parts(scheme, out_features, in_features)
    return {suffix: part._replace(dtypes=part.dtypes or dtypes) for suffix, part in parts.items()}


def beside_codes(scheme: DeclaredScheme) -> frozenset[str]:
    """Tensors that decoding its codes does not need."""
    zeros = scheme.layout.zeros(scheme)
    return _BESIDE_CODES - ({zeros.suffix} if zeros else set())


def quantized_looking(tensors: Iterable[TensorInfo]) -> set[str]:
    """Modules with a tensor, or a dtype of the weight, that only quantized linears have."""
    modules = set()
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        packed = suffix == "weight" and tensor.dtype in _PACKED_DTYPES
        if module and (packed or suffix in COMPANIONS):
            modules.add(module)
    return modules


_DECLARATION, _NESTED = "quantization_config", "quantization"
_OF_NO_SCHEME = (
    "quant_method", "producer", "version", "exclude_modules", "ignore", "group_size",
    "kv_cache_quant_algo",
)  # fmt: skip
Form = Literal["flat", "nested", "side file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawDeclaration:
    """A declaration as JSON, before it is interpreted.

    Attributes:
        value: the `quantization_config`; for the nested form, outer and inner keys together.
        form: "nested": in config.json; "side file": the same, only in hf_quant_config.json.
        has_method: it names a quant_method; a nested one always gets "modelopt".
    """

    value: Any
    where: Path
    key: str
    form: Form
    has_method: bool

    @property
    def is_empty(self) -> bool:
        """Whether it names no scheme: ModelOpt writes a null quant_algo for a BF16 draft.

        MLX's {group_size, bits, mode} says how tensors are packed, but not which.
        """
        declared = self.value if isinstance(self.value, dict) else {"": True}
        if not self.has_method and {"group_size", "bits"} <= declared.keys():
            return True
        named = any(value for key, value in declared.items() if key not in _OF_NO_SCHEME)
        return not named and str(declared.get("quant_method") or "modelopt").startswith("modelopt")


def raw_declaration(checkpoint: Checkpoint) -> RawDeclaration | None:
    """What a folder declares; None = nothing, or an empty declaration of a BF16 draft."""
    raw = written_declaration(checkpoint)
    if raw is None or not raw.is_empty or quantized_looking(checkpoint.tensors.values()):
        return raw
    return None


def written_declaration(checkpoint: Checkpoint) -> RawDeclaration | None:
    """The declaration that engines read, empty or not; None = there is none.

    Engines read config.json, and hf_quant_config.json only where that declares nothing (executed
    with vLLM 0.33 and SGLang 0.5.23).
    """
    declared = checkpoint.config.get(_DECLARATION)
    where, key = checkpoint.folder / CONFIG_FILE, _DECLARATION
    form: Form = "nested"
    if declared is None:
        where, key, form = checkpoint.folder / HF_QUANT_CONFIG, "", "side file"
        check_own(checkpoint.folder, HF_QUANT_CONFIG)
        if not where.exists():
            return None
        declared = read_json_object(where, "export it again")
    named = isinstance(declared, dict) and declared.get("quant_method") is not None
    flat = _flattened(declared)
    if flat is not None:
        key = f"{key}.{_NESTED}".lstrip(".")
    elif form == "nested":
        form, flat = "flat", declared
    else:
        flat = {"quant_method": "modelopt", **declared}  # no reader understands this
    return RawDeclaration(value=flat, where=where, key=key, form=form, has_method=named)


def _flattened(declared: object) -> dict[str, Any] | None:
    inner = declared.get(_NESTED) if isinstance(declared, dict) else None
    if not isinstance(declared, dict) or not isinstance(inner, dict):
        return None
    outer = {key: value for key, value in declared.items() if key != _NESTED}
    if outer.keys() & inner.keys():
        return None
    return {"quant_method": "modelopt", **outer, **inner}


# Keys that say who made the folder or how values were found, never how to decode them.
_NO_MEANING = frozenset({"producer", "version", "quant_mode", "global_compression_ratio"})


def declared_scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    """What a folder declares, None = nothing; VerifyError where it is not understood."""
    packed = packed_by_mlx(checkpoint.tensors)
    if packed is not None:
        raise DeclarationError(checkpoint.folder, packed.what, fix=packed.fix)
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness="folder")


def read_scheme(raw: RawDeclaration, *, strictness: Strictness) -> DeclaredScheme:
    """The one reader of declarations."""
    keys = ObjectReader(raw.value, raw.where, raw.key, _NO_MEANING, strictness)
    _check_not_refused(raw)
    layout = READ_LAYOUTS[keys.choice("quant_method", *READ_LAYOUTS)]
    scheme = dataclasses.replace(layout.read(keys), excludes=layout.excludes(keys))
    if strictness == "folder" and layout.side_file and raw.form != "side file":
        layout.side_file.check(raw.where.parent, scheme, raw.value)
    keys.finish()
    if strictness in ("folder", "declaration"):
        _check_patterns(keys, scheme)
    return scheme


def _check_patterns(keys: ObjectReader, scheme: DeclaredScheme) -> None:
    targets = (target for each in (scheme, *scheme.others) for target in each.targets)
    for pattern in (*scheme.excludes, *targets):
        if pattern.startswith("re:"):
            try:
                understood(pattern[3:])
            except PatternProblem as exc:
                raise no_pattern(keys.where, keys.key, pattern, exc) from exc


def _check_not_refused(raw: RawDeclaration) -> None:
    method = raw.value.get("quant_method") if isinstance(raw.value, dict) else None
    if isinstance(method, str) and (why := UNREAD_METHODS.get(method)):
        what = f"{raw.key}.quant_method: {method} is not read: {why}"
        raise DeclarationError(raw.where, what, fix=OTHER_WAY.format(method))


def looks_quantized(checkpoint: Checkpoint) -> bool:
    """True if a folder declares a quantization, or stores what only quantized linears have."""
    return raw_declaration(checkpoint) is not None or bool(
        quantized_looking(checkpoint.tensors.values())
    )
