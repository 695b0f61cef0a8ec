"""How a declaration says that linears are stored, as engines read it.

An engine takes the keys that it knows: it reads more than this package decodes, and less strictly.
What `stored.layouts` can read comes from there; other kinds, which llm-compressor, ModelOpt and
Quark write, are told below. Their sources are modules of vLLM 0.33.0 and SGLang 0.5.23.
Anything else is UNKNOWN, unless the engine refuses its method.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ...recipes.errors import CheckpointError, VerifyError, short
from ..drafts.config_reader import object_at
from ..files.checkpoint import Checkpoint
from ..stored.layouts import LAYOUTS, READ_LAYOUTS
from ..stored.layouts.declaration_reader import ObjectReader
from ..stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, DeclaredScheme, Part, Parts
from ..stored.stored_declaration import Form, RawDeclaration, stored_parts, written_declaration
from .linear_scheme import (
    ANY_FLOAT,
    BLOCKS,
    COLUMNS,
    FLOAT,
    FP8,
    GROUPS_OF_COLUMNS,
    PAIRS,
    ROWS,
    LinearScheme,
    Signature,
    Size,
    TensorForm,
    scheme_of_tensors,
)

Declared = Mapping[str, Any]


class Group(NamedTuple):
    """The linears that `targets` name, by module or by class."""

    targets: tuple[str, ...]
    scheme: LinearScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A `quantization_config`, or the hf_quant_config.json where there is none, raw.

    Attributes:
        method: its quant_method; None where the key is missing; an engine may still take it for
            ModelOpt's.
        form: how it is written. algorithm: ModelOpt's quant_algo.
        layout: the quant_method whose rule compares excludes with names; None where it is not
            understood.
        groups: which linears are stored how; empty where it is not understood: `problem` says why.
        exclude_remedy: what to do about excludes where the engine reads none of them.
        spelled: the quant_method before the engine took it for another one.
    """

    method: str | None
    form: Form
    algorithm: str | None
    by_modelopt: bool
    keys: Mapping[str, Any]
    layout: str | None = None
    groups: tuple[Group, ...] = ()
    excludes: tuple[str, ...] = ()
    problem: str | None = None
    exclude_remedy: str | None = None
    spelled: str | None = None

    @property
    def cache_dtype(self) -> str | None:
        """An engine's option for a draft's KV cache, as four layouts declare it; None = no FP8."""
        export, scheme = self.keys.get("export"), self.keys.get("kv_cache_scheme")
        named = self.keys.get("kv_cache_quant_algo") == "FP8" or scheme == "static"
        if isinstance(scheme, Mapping):
            named = named or (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        if isinstance(export, Mapping):
            named = named or bool(export.get("kv_cache_group"))
        return "fp8" if named else None

    @property
    def signature(self) -> Signature | None:
        """That of every linear; None where it is not understood or there are several."""
        signatures = {group.scheme.signature for group in self.groups}
        return signatures.pop() if len(signatures) == 1 else None


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing. A declaration that is not an object is refused."""
    written = written_declaration(checkpoint)
    if written is None:
        return None
    raw = written.value
    if not isinstance(raw, dict):
        raise CheckpointError(
            written.where,
            f"quantization_config: expected an object with quant_method, got {short(raw)}",
            fix="remove it, or quantize the draft again",
        )
    algorithm, producer = raw.get("quant_algo"), raw.get("producer")
    method = raw.get("quant_method") if written.has_method else None
    return Declaration(
        method=None if method is None else str(method),
        form=written.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        keys=raw,
        **_understood(written, str(method or ("modelopt" if algorithm else ""))),
    )


def _understood(written: RawDeclaration, method: str) -> dict[str, Any]:
    """The declaration as decoded here without unknown keys, or as a row; or why neither works.

    Layouts that are only read have excludes in keys of their own, which engines read.
    """
    layout = READ_LAYOUTS.get(method)
    if layout is None:
        return {}
    if object_at(written.value, "sparsity_config").get("targets"):
        return {"problem": "sparsity_config, which leaves zeros out of what is stored"}
    try:
        keys = ObjectReader(written.value, written.where, written.key, strictness="engine")
        excludes = layout.excludes(keys) if method in LAYOUTS else ()
        scheme = layout.read(keys)
        groups = tuple(Group(e.targets, of_declared(e)) for e in (scheme, *scheme.others))
        return {"layout": layout.name, "groups": groups, "excludes": excludes}
    except (NotReadError, VerifyError) as exc:
        problem = " ".join(str(exc).split())
    try:
        groups = READERS[method](written.value)
        return {"layout": layout.name, "groups": groups, "excludes": layout.excludes(keys)}
    except (KeyError, NotReadError, VerifyError):
        return {"problem": problem}


_SAYS_SYMMETRIC = {("awq", True)}


def of_declared(scheme: DeclaredScheme) -> LinearScheme:
    """What this package decodes, as engines take it: scales in any float dtype."""
    layout, in_groups = scheme.layout, scheme.granularity == "group"
    return LinearScheme(
        signature=Signature(
            layout=layout.name,
            dtype=scheme.weight_dtype.removesuffix("_e4m3"),
            granularity="ordered" if scheme.ordered else scheme.granularity,
            group_size=(scheme.group_size or 0) if in_groups else 0,
            activations=scheme.activations,
            zero_points=scheme.asymmetric,
            says_symmetric=(layout.name, layout.declares_symmetry) in _SAYS_SYMMETRIC,
            of_fp8=scheme.first_stage is not None,
        ),
        suffix=layout.weight_suffix(scheme),
        parts=lambda rows, columns: _in_any_float(stored_parts(scheme, rows, columns)),
    )


def _in_any_float(parts: Parts) -> Parts:
    """Engines copy a float of one dtype into a parameter of another, powers of two too."""
    floats = set(FLOAT_DTYPES)
    return {
        suffix: Part(ANY_FLOAT, part.shape) if set(part.dtypes) <= floats else part
        for suffix, part in parts.items()
    }


class NotReadError(Exception):
    """A declaration has a value whose effect on engines is not known."""


def not_read(key: str, value: object) -> NoReturn:
    """Give up at a key."""
    raise NotReadError(f"{key} {value!r}")


def mapping(key: str, value: object) -> Declared:
    """A section of a declaration, of any JSON type, as an object."""
    return value if isinstance(value, Mapping) else not_read(key, value)


# ---- Kinds that this package does not decode

_BYTES = ("U8",)
_SCALES_OF_16 = TensorForm("weight_scale", FP8, (ROWS, Size("columns", 16)))
_POWERS_OF_32 = TensorForm("weight_scale", _BYTES, (ROWS, Size("columns", 32)))
_FP4, _FP8 = (TensorForm("weight", kind, (ROWS, last)) for kind, last in (
    (_BYTES, PAIRS), (FP8, COLUMNS),
))  # fmt: skip


def _fp32(suffix: str, *shape: Size | int) -> TensorForm:
    return TensorForm(suffix, ("F32",), shape)


_WHOLE = (_fp32("weight_scale_2"), _fp32("input_scale"))
_OF_MODELOPT: Mapping[str, tuple[dict[str, Any], tuple[TensorForm, ...]]] = {
    "FP8": (
        {"dtype": "fp8", "granularity": "tensor", "activations": "tensor-static"},
        (_FP8, _fp32("weight_scale"), _WHOLE[1]),
    ),
    "NVFP4": (
        {"dtype": "nvfp4", "granularity": "group", "group_size": 16, "activations": "nvfp4"},
        (_FP4, _SCALES_OF_16, *_WHOLE),
    ),
    "FP8_PB_WO": (
        {"dtype": "fp8", "granularity": "block"},
        (_FP8, _fp32("weight_scale", BLOCKS[0], 1, BLOCKS[1], 1)),
    ),
    "MXFP8": (
        {"dtype": "mxfp8", "granularity": "group", "group_size": 32, "activations": "mxfp8"},
        (_FP8, _POWERS_OF_32),
    ),
}
"""Those that engines have: `modelopt.py` of vLLM."""


def _of_modelopt(algorithm: str) -> LinearScheme:
    names, tensors = _OF_MODELOPT[algorithm]
    return scheme_of_tensors(Signature(layout="modelopt", **names), *tensors)


def _modelopt(declared: Declared) -> tuple[Group, ...]:
    """For MIXED_PRECISION one group for each algorithm, for layers by name on disk."""
    algorithm = str(declared.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        return (Group(EVERY_LINEAR, _of_modelopt(algorithm)),)
    names: dict[str, list[str]] = {}
    for name, entry in mapping("quantized_layers", declared.get("quantized_layers")).items():
        algorithm = str(entry.get("quant_algo") if isinstance(entry, Mapping) else entry).upper()
        names.setdefault(algorithm, []).append(name)
    return tuple(Group(tuple(named), _of_modelopt(each)) for each, named in names.items())


def _compressed_tensors(declared: Declared) -> tuple[Group, ...]:
    """One per entry of config_groups, each with targets and a format of its own.

    `_quantization_scheme_map_from_config` and `_get_scheme_from_parts` of vLLM, and the like in
    SGLang. Keys that neither reads (observer, scale_dtype of floats, version, kv_cache_scheme of a
    draft without scales) say nothing here; transforms of weights change nothing stored, and those
    of inputs and outputs, which only vLLM reads, were never executed with a draft.
    """
    if any(location in ("input", "output") for _, location, _ in transforms(declared)):
        not_read("transform_config", "of inputs or outputs")
    entries = mapping("config_groups", declared.get("config_groups"))
    usual = declared.get("format")
    groups = tuple(_ct_group(mapping(name, group), usual) for name, group in entries.items())
    return groups or not_read("config_groups", entries)


def transforms(declaration: Mapping[str, Any]) -> Iterator[tuple[str, object, list[Any]]]:
    """Name of each transform, with each location and its targets, of any JSON type."""
    groups = object_at(object_at(declaration, "transform_config"), "config_groups")
    for name in groups:
        applied = object_at(groups, name).get("apply")
        for each in applied if isinstance(applied, list) else []:
            if isinstance(each, Mapping) and isinstance(each.get("targets"), list):
                yield name, each.get("location"), each["targets"]


def _ct_group(group: Declared, usual_format: object) -> Group:
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        not_read("targets", targets)
    if group.get("output_activations"):
        not_read("output_activations", group["output_activations"])
    weights, inputs = mapping("weights", group.get("weights")), group.get("input_activations")
    if weights.get("dynamic"):
        not_read("dynamic", weights["dynamic"])
    activations = _ct_activations(mapping("input_activations", inputs)) if inputs else "none"
    form = group.get("format") or usual_format
    if weights.get("type") == "int":
        return Group(tuple(targets), _ct_integers(weights, activations, form))
    return Group(tuple(targets), _ct_floats(weights, activations))


def _ct_floats(weights: Declared, activations: str) -> LinearScheme:
    strategy, dtype = str(weights.get("strategy")), _ct_dtype(weights)
    blocks = strategy == "block" and weights.get("block_structure") != [128, 128]
    static = activations == "tensor-static"
    size = weights.get("group_size") or 0
    unread = blocks or static or dtype not in _CT_FLOATS or type(size) is not int
    if unread or not weights.get("symmetric", True):
        not_read("weights", dict(weights))
    shapes = {"tensor": (1,), "channel": (ROWS, 1), "block": BLOCKS}
    tensors = _CT_FLOATS[dtype] or (
        _FP8,
        TensorForm("weight_scale", ANY_FLOAT, shapes.get(strategy, ())),
    )
    signature = Signature(
        layout="compressed-tensors",
        dtype=dtype,
        granularity="group" if _CT_FLOATS[dtype] else strategy,
        group_size=size,
        activations=activations,
    )
    return scheme_of_tensors(signature, *tensors)


_CT_FLOATS: Mapping[str, tuple[TensorForm, ...]] = {
    "fp8": (),
    "mxfp4": (TensorForm("weight_packed", _BYTES, (ROWS, PAIRS)), _POWERS_OF_32),
    "mxfp8": (_FP8, _POWERS_OF_32),
}
"""The tensors of a dtype; of fp8 the strategy decides."""


def _ct_dtype(args: Declared) -> str:
    bits, kind, strategy = args.get("num_bits"), args.get("type"), args.get("strategy")
    size = args.get("group_size")
    if kind == "int":
        return f"int{bits}"
    if bits == 4:
        return {"tensor_group 16": "nvfp4", "group 32": "mxfp4"}.get(f"{strategy} {size}", "fp4")
    powers = strategy == "group" and size == 32 and "uint8" in str(args.get("scale_dtype"))
    return "mxfp8" if powers else "fp8"


def _ct_activations(inputs: Declared) -> str:
    """The spelling in signatures: "token-dynamic" is FP8, other formats are named."""
    dtype = _ct_dtype(inputs)
    if dtype in ("nvfp4", "mxfp4", "mxfp8"):
        return dtype
    how = "dynamic" if inputs.get("dynamic") else "static"
    named = f"{inputs.get('strategy')}-{how}"
    return named if dtype == "fp8" else f"{dtype}-{named}"


def _ct_integers(weights: Declared, activations: str, form: object) -> LinearScheme:
    """Packed into words, or a byte for each value."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    if strategy not in ("group", "channel", "tensor") or bits not in (4, 8):
        not_read("strategy, num_bits", (strategy, bits))
    is_size = type(size) is int and size > 0
    if not is_size and (size is not None or strategy == "group"):
        not_read("group_size", size)
    if form not in ("pack-quantized", "int-quantized"):
        not_read("format", form)
    if weights.get("actorder") in ("group", "dynamic"):
        not_read("actorder", weights["actorder"])
    packed, per_word = form == "pack-quantized", 32 // bits
    scales = (1,) if strategy == "tensor" else (ROWS, GROUPS_OF_COLUMNS)
    words = Size("columns", per_word, rounds_up=True)
    tensors = [TensorForm("weight_scale", ANY_FLOAT, scales)]
    if packed:
        tensors.append(TensorForm("weight_packed", ("I32",), (ROWS, words)))
        tensors.append(TensorForm("weight_shape", ("I64",), (2,)))
    else:
        tensors.append(TensorForm("weight", ("I8",), (ROWS, COLUMNS)))
    if not symmetric:
        zeros = (Size("rows", per_word, rounds_up=True), scales[-1])
        tensors.append(TensorForm("weight_zero_point", ("I32" if packed else "I8",), zeros))
    if activations.endswith("static"):
        tensors.append(TensorForm("input_scale", ANY_FLOAT, (1,)))
    signature = Signature(
        layout="compressed-tensors",
        dtype=f"int{bits}",
        granularity=strategy,
        group_size=size or 0,
        activations=activations,
        zero_points=not symmetric,
        unpacked=not packed,
    )
    return scheme_of_tensors(signature, *tensors)


def _quark(declared: Declared) -> tuple[Group, ...]:
    """Quark's, one for every linear: `quark.py` of both engines, and exports of Quark 0.13."""
    for key in ("layer_type_quant_config", "layer_quant_config"):
        if declared.get(key):
            not_read(key, declared[key])
    section = mapping("global_quant_config", declared.get("global_quant_config"))
    for key in ("output_tensors", "bias"):
        if section.get(key):
            not_read(key, section[key])
    weight, inputs = section.get("weight"), section.get("input_tensors")
    if _is_nvfp4(weight) and _is_nvfp4(inputs):
        signature = Signature(
            layout="quark", dtype="nvfp4", granularity="group", group_size=16, activations="nvfp4"
        )
        whole = (_fp32("weight_scale_2"), _fp32("input_scale_2"))
        scheme = scheme_of_tensors(signature, _FP4, _SCALES_OF_16, *whole)
    else:
        scheme = _quark_integers(mapping("weight", weight), inputs)
    return (Group(EVERY_LINEAR, scheme),)


def _quark_integers(weight: Declared, inputs: object) -> LinearScheme:
    """UINT4 in groups, its axes turned; INT8 with static inputs."""
    kind, size = (weight.get("dtype"), weight.get("qscheme")), weight.get("group_size")
    if kind == ("uint4", "per_group") and inputs is None and type(size) is int:
        words = Size("rows", 8, rounds_up=True)
        return scheme_of_tensors(
            Signature(layout="quark", dtype="uint4", granularity="group", group_size=size),
            TensorForm("weight", ("I32",), (COLUMNS, words)),
            TensorForm("weight_zero_point", ("I32",), (GROUPS_OF_COLUMNS, words)),
            TensorForm("weight_scale", FLOAT, (GROUPS_OF_COLUMNS, ROWS)),
            not_read=(),
        )
    theirs = mapping("input_tensors", inputs)
    if kind != ("int8", "per_tensor") or (theirs.get("dtype"), theirs.get("is_dynamic")) != (
        "int8",
        False,
    ):
        not_read("weight", dict(weight))
    signature = Signature(
        layout="quark", dtype="int8", granularity="tensor", activations="int8-tensor-static"
    )
    return scheme_of_tensors(
        signature,
        TensorForm("weight", ("I8",), (ROWS, COLUMNS)),
        TensorForm("weight_scale", FLOAT),
        TensorForm("weight_zero_point", ("I8",)),
        TensorForm("input_scale", FLOAT),
    )


def _is_nvfp4(stages: Any) -> bool:
    """FP4 in groups of 16, whose scales are FP8 under one of the matrix."""
    if not isinstance(stages, list) or len(stages) != 2:
        return False
    first, second = (mapping("weight", stage) for stage in stages)
    sizes = (first.get("dtype"), first.get("group_size"), second.get("dtype"))
    return sizes == ("fp4", 16, "fp8_e4m3") and bool(second.get("is_scale_quant"))


READERS: Mapping[str, Callable[[Declared], tuple[Group, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
}
"""quant_method -> the groups of a declaration. Raises NotReadError."""
