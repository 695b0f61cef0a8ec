"""How a declaration says that linears are stored, as engines read it.

An engine takes the keys that it knows: it reads more than this package decodes, and less strictly.
What `stored.layouts` can read comes from there; other kinds, which llm-compressor, ModelOpt and
Quark write, are rows of forms.toml. Their sources are modules of vLLM 0.33.0 and SGLang 0.5.23.
Anything else is UNKNOWN, unless the engine refuses its method.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ...recipes.errors import CheckpointError, VerifyError, short
from ...recipes.formats import NUMBER_FORMATS
from ...recipes.packages import counts, rows_beside
from ..drafts.config_reader import object_at
from ..files.checkpoint import Checkpoint
from ..stored.layouts import LAYOUTS, READ_LAYOUTS
from ..stored.layouts.declaration_reader import ObjectReader
from ..stored.layouts.scheme import (
    EVERY_LINEAR,
    FLOAT_DTYPES,
    FP8_DTYPE,
    GROUPS,
    DeclaredScheme,
    Part,
    Parts,
)
from ..stored.stored_declaration import Form, RawDeclaration, stored_parts, written_declaration

ANY_FLOAT = (*FLOAT_DTYPES, "F8_E8M0")
Declared = Mapping[str, Any]
_SYMMETRIC = ("weight_shape", "weight_zero_point", "weight_zero_point_2", "g_idx")
"""No kernel reads them: values are symmetric, and groups in order."""
_ONE_GRANULARITY = (*GROUPS, "mxfp8")
_GLOBAL_SCALES = {name for name, number in NUMBER_FORMATS.items() if number.global_scale}
_DTYPES = {"F8": (FP8_DTYPE,), "F": FLOAT_DTYPES, "A": ANY_FLOAT}
"""Abbreviations of `_stored`; other words are dtypes of safetensors."""
_TENSOR = re.compile(r"(\w+) (\w+) \[(.*?)\]")
_VALUES = ("weight", "weight_packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    """One way to store a linear.

    Attributes:
        layout: the quant_method that stores it so.
        signature: key of schemes.toml, such as "quark int4 group128 none".
        first_stage: values were rounded to another format before.
        suffix: last part of the name of the tensor with the values.
        parts: rows and columns of a linear -> its stored tensors.
        not_read: suffixes of parts whose absence no engine minds.
    """

    layout: str
    signature: str
    weight_dtype: str
    granularity: str
    group_size: int | None
    first_stage: bool = False
    suffix: str
    parts: Callable[[int, int], Parts]
    not_read: tuple[str, ...] = _SYMMETRIC

    @property
    def has_global_scale(self) -> bool:
        """Whether one scale of the whole matrix multiplies those of its groups."""
        return self.weight_dtype in _GLOBAL_SCALES


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
    def signature(self) -> str | None:
        """The key of schemes.toml; None where it is not understood or there are several."""
        found = {group.scheme.signature for group in self.groups}
        return found.pop() if len(found) == 1 else None


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing. A declaration that is not an object is refused."""
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
    return Declaration(
        method=None if method is None else str(method),
        form=found.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        keys=raw,
        **_understood(found, str(method or ("modelopt" if algorithm else ""))),
    )


def _understood(found: RawDeclaration, method: str) -> dict[str, Any]:
    """The declaration as decoded here without unknown keys, or as a row; or why neither works.

    Layouts that are only read have excludes in keys of their own, which engines read.
    """
    layout = READ_LAYOUTS.get(method)
    if layout is None:
        return {}
    try:
        keys = ObjectReader(found.value, found.where, found.key, strictness="engine")
        excludes = layout.excludes(keys) if method in LAYOUTS else ()
        scheme = layout.read(keys)
        groups = tuple(Group(e.targets, of_declared(e)) for e in (scheme, *scheme.others))
        return {"layout": layout.name, "groups": groups, "excludes": excludes}
    except (NotReadError, VerifyError) as exc:
        problem = " ".join(str(exc).split())
    try:
        groups = READERS[method](found.value)
        return {"layout": layout.name, "groups": groups, "excludes": layout.excludes(keys)}
    except (KeyError, NotReadError, VerifyError):
        return {"problem": problem}


_OF_ONE_FORMAT = frozenset({"auto-round"})
"""Layouts for which engines were asked with one format for all linears."""
_BEFORE: Mapping[tuple[str, object], str] = {("auto-round", "reorder"): "awq-"}
_BEHIND = {("awq", True): "="}
"""Prefix of a dtype's name, by packing, and suffix, where symmetry is declared."""


def of_declared(scheme: DeclaredScheme) -> LinearScheme:
    """What this package decodes, as engines take it: scales in any float dtype."""
    layout = scheme.layout
    if layout.name in _OF_ONE_FORMAT and (scheme.others or scheme.version):
        not_read("extra_config", "linears of another format")
    before = _BEFORE.get((layout.name, scheme.pack_method), "")
    dtype = before + scheme.weight_dtype.removesuffix("_e4m3")
    dtype += _BEHIND.get((layout.name, layout.declares_symmetry), "")
    names = [layout.name, dtype + ("+" if scheme.asymmetric else "")]
    granularity = "ordered" if scheme.ordered else scheme.granularity
    if scheme.weight_dtype not in _ONE_GRANULARITY:
        size = scheme.group_size if scheme.granularity == "group" else None
        names.append(f"{granularity}{size or ''}{'+fp8' if scheme.first_stage else ''}")
    return LinearScheme(
        layout=layout.name,
        signature=" ".join([*names, scheme.activations]),
        weight_dtype=before + scheme.weight_dtype,
        granularity=granularity,
        group_size=scheme.group_size,
        first_stage=scheme.first_stage is not None,
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


def _form(layout: str, facts: Mapping[str, Any]) -> LinearScheme:
    """The scheme of the first row of forms.toml whose condition holds."""
    for row in rows_beside(__file__, "forms")[layout]:
        if counts(row, facts):
            dtype, granularity, activations = (part.format_map(facts) for part in row["scheme"])
            size, stored = facts["size"] if "grouped" in row else None, row["stored"]
            names = (layout, dtype, granularity, size, activations, stored.format_map(facts))
            return linear_scheme(*names, not_read=tuple(row.get("not_read", ("weight_shape",))))
    return not_read(layout, dict(facts))


def linear_scheme(
    layout: str,
    dtype: str,
    granularity: str,
    size: int | None,
    activations: str,
    stored: str,
    *,
    bits: int = 4,
    not_read: tuple[str, ...] = ("weight_shape",),
) -> LinearScheme:
    """A scheme under the signature "layout dtype granularity activations".

    Args:
        dtype: of the values; "+" after it: with zero points, "@": a whole byte for each value.
        granularity: "" for formats that have only one.
        size: of a group; None where there are no groups.
        stored: text that `_stored` reads.
        bits: of one value in words.
    """
    own = dtype not in _ONE_GRANULARITY
    names = [layout, dtype, *([f"{granularity}{size or ''}"] if own else []), activations]
    suffixes = [match[1] for match in _TENSOR.finditer(stored)]
    return LinearScheme(
        layout=layout,
        signature=" ".join(name for name in names if name),
        weight_dtype={"fp8": "fp8_e4m3"}.get(dtype, dtype.rstrip("+@")),
        granularity=granularity if own else "group",
        group_size=size,
        suffix=next(suffix for suffix in suffixes if suffix in _VALUES),
        parts=lambda rows, columns: _stored(stored, rows, columns, size, bits),
        not_read=not_read,
    )


def _stored(text: str, rows: int, columns: int, size: int | None, bits: int) -> Parts:
    """Tensors by suffix, from "weight F8 [r c], weight_scale F []".

    Sizes are r rows, c columns, g whole groups of columns, R and C blocks of 128 along both, rw and
    cw words of 32 bits along both, and numbers; c/16 is a sixteenth of c.
    """
    known = {
        "r": rows,
        "c": columns,
        "g": columns // (size or columns or 1),
        "R": -(-rows // 128),
        "C": -(-columns // 128),
        "rw": -(-rows * bits // 32),
        "cw": -(-columns * bits // 32),
    }

    def number(word: str) -> int:
        name, _, by = word.partition("/")
        return known[name] // int(by or 1) if name in known else int(name)

    return {
        suffix: Part(_DTYPES.get(dtype, (dtype,)), tuple(map(number, sizes.split())))
        for suffix, dtype, sizes in _TENSOR.findall(text)
    }


def _modelopt(declared: Declared) -> tuple[Group, ...]:
    """For MIXED_PRECISION one group for each algorithm, for layers by name on disk."""
    algorithm = str(declared.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        return (Group(EVERY_LINEAR, _form("modelopt", {"algorithm": algorithm})),)
    names: dict[str, list[str]] = {}
    for name, said in mapping("quantized_layers", declared.get("quantized_layers")).items():
        algorithm = str(said.get("quant_algo") if isinstance(said, Mapping) else said).upper()
        names.setdefault(algorithm, []).append(name)
    schemes = {each: _form("modelopt", {"algorithm": each}) for each in names}
    return tuple(Group(tuple(names[each]), scheme) for each, scheme in schemes.items())


def _compressed_tensors(declared: Declared) -> tuple[Group, ...]:
    """One per entry of config_groups, each with targets and a format of its own.

    `_quantization_scheme_map_from_config` and `_get_scheme_from_parts` of vLLM, and the like in
    SGLang. Keys that neither reads (observer, scale_dtype of floats, version, kv_cache_scheme of a
    draft without scales) say nothing here; transforms of weights change nothing stored, and those
    of inputs and outputs, which only vLLM reads, were never executed with a draft.
    """
    if any(location in ("input", "output") for _, location, _ in transforms(declared)):
        not_read("transform_config", "of inputs or outputs")
    found = mapping("config_groups", declared.get("config_groups"))
    usual = declared.get("format")
    groups = tuple(_ct_group(mapping(name, group), usual) for name, group in found.items())
    return groups or not_read("config_groups", found)


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
    read = _ct_integers if weights.get("type") == "int" else _ct_floats
    return Group(tuple(targets), read(weights, activations, form))


def _ct_floats(weights: Declared, activations: str, _form_name: object) -> LinearScheme:
    strategy = str(weights.get("strategy"))
    blocks = strategy == "block" and weights.get("block_structure") != [128, 128]
    if blocks or not weights.get("symmetric", True):
        not_read("weights", dict(weights))
    return _form(
        "compressed-tensors",
        {
            "dtype": _ct_dtype(weights),
            "strategy": strategy,
            "activations": activations,
            "scales": {"tensor": "1", "channel": "r 1", "block": "R C"}.get(strategy, ""),
            "size": weights.get("group_size"),
        },
    )


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
    """Packed into words, or a byte for each value; if ordered, a group's inputs may be anywhere."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    if strategy not in ("group", "channel", "tensor") or bits not in (4, 8):
        not_read("strategy, num_bits", (strategy, bits))
    if size is not None and (type(size) is not int or size < 1):
        not_read("group_size", size)
    if form not in ("pack-quantized", "int-quantized"):
        not_read("format", form)
    packed = form == "pack-quantized"
    scales = "1" if strategy == "tensor" else "r g"
    stored = f"weight_scale A [{scales}], "
    stored += "weight_packed I32 [r cw], weight_shape I64 [2]" if packed else "weight I8 [r c]"
    if not symmetric:
        stored += f", weight_zero_point {'I32' if packed else 'I8'} [rw {scales.split()[-1]}]"
    if activations.endswith("static"):
        stored += ", input_scale A [1]"
    if ordered := weights.get("actorder") in ("group", "dynamic"):
        stored += ", weight_g_idx I32 [c]"
    dtype = f"int{bits}" + ("" if symmetric else "+") + ("" if packed else "@")
    how = "ordered" if ordered else strategy
    return linear_scheme("compressed-tensors", dtype, how, size, activations, stored, bits=bits)


def _quark(declared: Declared) -> tuple[Group, ...]:
    """Quark's, one for every linear: `quark.py` of both engines, and exports of Quark 0.13."""
    for key in ("layer_type_quant_config", "layer_quant_config"):
        if declared.get(key):
            not_read(key, declared[key])
    section = mapping("global_quant_config", declared.get("global_quant_config"))
    weight, inputs = section.get("weight"), section.get("input_tensors")
    first: Any = weight if isinstance(weight, Mapping) else {}
    facts = {
        "is_nvfp4": _is_nvfp4(weight) and _is_nvfp4(inputs),
        "weight": first,
        "size": first.get("group_size"),
        "is_sized": type(first.get("group_size")) is int,
        "is_bare": inputs is None,
        "inputs": inputs if isinstance(inputs, Mapping) else {},
    }
    return (Group(EVERY_LINEAR, _form("quark", facts)),)


def _is_nvfp4(stages: Any) -> bool:
    """FP4 in groups of 16, whose scales are FP8 under one of the matrix."""
    if not isinstance(stages, list) or len(stages) != 2:
        return False
    first, second = (mapping("weight", stage) for stage in stages)
    sizes = (first.get("dtype"), first.get("group_size"), second.get("dtype"))
    return sizes == ("fp4", 16, "fp8_e4m3") and bool(second.get("is_scale_quant"))


def quantizes_outputs(declared: Declared) -> bool:
    """Whether Quark's outputs or biases are to be quantized, except those of the KV cache."""
    cache = object_at(declared, "export").get("kv_cache_group")
    cache = cache if isinstance(cache, list) else []
    layers = object_at(declared, "layer_quant_config")
    sections = [said for name, said in layers.items() if name not in cache]
    sections.append(declared.get("global_quant_config"))
    return any(
        isinstance(said, Mapping) and (said.get("output_tensors") or said.get("bias"))
        for said in sections
    )


READERS: Mapping[str, Callable[[Declared], tuple[Group, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
}
"""quant_method -> the groups of a declaration. Raises NotReadError."""
