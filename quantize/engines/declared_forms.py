"""Declarations as engines read them: more kinds than draftquant decodes, and less strictly.

A reader returns the groups of linears of one quant_method, and how they are stored; its sources are
modules of vLLM 0.33.0 and SGLang 0.5.23.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...recipes.errors import CheckpointError, VerifyError, short
from ...recipes.packages import counts
from ..drafts.config_reader import object_at
from ..files.checkpoint import Checkpoint
from ..stored.layouts import LAYOUTS
from ..stored.layouts.declaration_reader import ObjectReader
from ..stored.layouts.scheme import EVERY_LINEAR
from ..stored.stored_declaration import RawDeclaration, read_scheme, written_declaration
from .contract import Declaration
from .engine_rows import Facts, data_file
from .excludes import FOR_REGEX
from .linear_scheme import (
    BLOCK,
    Declared,
    Group,
    LinearScheme,
    NotReadError,
    block_of,
    linear_scheme,
    mapping,
    not_read,
    of_declared,
)


def _for_every(scheme: LinearScheme) -> tuple[Group, ...]:
    return (Group(EVERY_LINEAR, scheme),)


def _form(layout: str, facts: Facts, *, block: tuple[int, int] = BLOCK) -> LinearScheme:
    """The scheme of the first row of forms.toml whose condition holds."""
    for row in data_file("forms")[layout]:
        if counts(row, facts):
            dtype, granularity, activations = (part.format_map(facts) for part in row["scheme"])
            size, stored = facts["size"] if "grouped" in row else None, row["stored"]
            names = (layout, dtype, granularity, size, activations, stored.format_map(facts))
            not_minded = tuple(row.get("not_read", ("weight_shape",)))
            return linear_scheme(*names, not_read=not_minded, block=block)
    return not_read(layout, dict(facts))


def _awq(declared: Declared) -> tuple[Group, ...]:
    """AutoAWQ: 4 bits in groups of any size; whatever its version is.

    `AutoAWQConfig.from_config` and `AWQConfig` do not read `version`: files of GEMV are loaded as
    those of GEMM are. Both take the keys of llm-awq.
    """
    bits = declared.get("w_bit", declared.get("bits"))
    size = declared.get("q_group_size", declared.get("group_size"))
    if bits != 4 or type(size) is not int:
        not_read("bits, group_size", (bits, size))
    return _for_every(_form("awq", {"zero_point": declared.get("zero_point"), "size": size}))


def _int8_blocks(declared: Declared) -> tuple[Group, ...]:
    block = block_of("weight_block_size", declared.get("weight_block_size"))
    return _for_every(_form("blockwise_int8", {}, block=block))


def _plain_fp8(declared: Declared) -> tuple[Group, ...]:
    """Plain fp8 as DeepSeek and its kin publish it: blocks of any size, or whole.

    `Fp8Config.from_config` of both reads no other keys. `scale_fmt` says which values scales have,
    or get; their shape is the same.
    """
    blocks = declared.get("weight_block_size")
    block = BLOCK if blocks is None else block_of("weight_block_size", blocks)
    keys = {"activation_scheme": declared.get("activation_scheme"), "weight_block_size": blocks}
    return _for_every(_form("fp8", keys, block=block))


def _gptq(declared: Declared) -> tuple[Group, ...]:
    """GPTQ, as GPTQModel and AutoGPTQ store it; rules of `dynamic` go before.

    `AutoGPTQConfig` and `GPTQMarlinConfig`; the first expression that matches from the start of a
    name decides (`get_dynamic_override`). Neither reads `checkpoint_format`: symmetric values need
    no zero points.
    """
    if declared.get("lm_head"):
        not_read("lm_head", declared["lm_head"])
    own = [
        Group(
            (f"re:{rule.removeprefix('+:')}",),
            _gptq_scheme({**declared, **mapping("dynamic", said)}),
        )
        for rule, said in mapping("dynamic", declared.get("dynamic") or {}).items()
        if not rule.startswith("-:") and said
    ]
    return (*own, Group(EVERY_LINEAR, _gptq_scheme(declared)))


def _gptq_scheme(declared: Declared) -> LinearScheme:
    bits, size = _bits(declared), _group_size(declared)
    ordered, symmetric = declared.get("desc_act"), declared.get("sym")
    if type(ordered) is not bool or type(symmetric) is not bool:
        not_read("desc_act, sym", (ordered, symmetric))
    return _packed("gptq", bits, size, symmetric=symmetric, ordered=ordered and size is not None)


def _auto_round(declared: Declared) -> tuple[Group, ...]:
    """AutoRound, packed as `packing_format` says; before it what `extra_config` has of its own.

    `INCConfig` and `AutoRoundConfig`. An expression is searched anywhere in a name; vLLM takes a
    name by its end as well.
    """
    kind, backend = declared.get("data_type", "int"), declared.get("backend", "auto")
    if kind != "int" or backend != "auto":
        not_read("data_type, backend", (kind, backend))
    own = []
    for name, changes in mapping("extra_config", declared.get("extra_config") or {}).items():
        bits = changes.get("bits", 0) if isinstance(changes, Mapping) else None
        if type(bits) is not int:
            not_read("extra_config", name)
        if bits < 16:
            said = {key: changes[key] for key in ("bits", "group_size", "sym") if key in changes}
            target = f"re:.*(?:{name})" if FOR_REGEX & set(name) else name
            own.append(Group((target,), _auto_round_scheme({**declared, **said})))
    return (*own, Group(EVERY_LINEAR, _auto_round_scheme(declared)))


def _auto_round_scheme(declared: Declared) -> LinearScheme:
    bits, size, symmetric = _bits(declared), _group_size(declared), declared.get("sym", True)
    if type(symmetric) is not bool:
        not_read("sym", symmetric)
    packing = declared.get("packing_format", "auto_round:auto_gptq")
    if packing == "auto_round:auto_gptq":
        return _packed("auto-round", bits, size, symmetric=symmetric, ordered=False)
    if packing != "auto_round:auto_awq" or bits != 4:
        not_read("packing_format, bits", (packing, bits))
    dtype, how = "awq-int4" + ("" if symmetric else "+"), "group" if size else "channel"
    stored = "qweight I32 [c rw], qzeros I32 [g rw], scales F [g r]"
    return linear_scheme("auto-round", dtype, how, size, "none", stored)


def _packed(
    method: str, bits: int, size: int | None, *, symmetric: bool, ordered: bool
) -> LinearScheme:
    """Values in words along the inputs, a row of scales for each group of inputs.

    g_idx is in order where inputs are not ordered by activation; vLLM 0.33 drops it
    (`base_config.py`).
    """
    dtype = f"int{bits}" + ("" if symmetric else "+")
    how = "ordered" if ordered else ("group" if size else "channel")
    stored = "qweight I32 [cw r], qzeros I32 [G rw], scales F [G r], g_idx I32 [c]"
    return linear_scheme(method, dtype, how, size, "none", stored, bits=bits, not_read=("g_idx",))


def _group_size(declared: Declared) -> int | None:
    """None for one group in a row."""
    size = declared.get("group_size")
    if type(size) is not int or not (size > 0 or size == -1):
        not_read("group_size", size)
    return size if size > 0 else None


def _bits(declared: Declared) -> int:
    value = declared.get("bits")
    return value if type(value) is int and value > 0 else not_read("bits", value)


def _modelopt(declared: Declared) -> tuple[Group, ...]:
    """Of MIXED_PRECISION one group for each algorithm, for layers by name on disk."""
    algorithm = str(declared.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        return _for_every(_form("modelopt", {"algorithm": algorithm}))
    names: dict[str, list[str]] = {}
    for name, said in mapping("quantized_layers", declared.get("quantized_layers")).items():
        algorithm = str(said.get("quant_algo") if isinstance(said, Mapping) else said).upper()
        names.setdefault(algorithm, []).append(name)
    schemes = {each: _form("modelopt", {"algorithm": each}) for each in names}
    return tuple(Group(tuple(names[each]), scheme) for each, scheme in schemes.items())


def _compressed_tensors(declared: Declared) -> tuple[Group, ...]:
    """One per entry of config_groups, each with targets and a format of its own.

    `_quantization_scheme_map_from_config` and `_get_scheme_from_parts` of vLLM, and their like in
    SGLang. Keys that neither reads (observer, scale_dtype of floats, version, kv_cache_scheme of a
    draft without scales) say nothing here; transforms change nothing stored.
    """
    found = declared.get("config_groups")
    if not isinstance(found, Mapping) or not found:
        not_read("config_groups", found)
    usual = declared.get("format")
    return tuple(_ct_group(mapping(name, group), usual) for name, group in found.items())


def _ct_group(group: Declared, usual_format: object) -> Group:
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        not_read("targets", targets)
    if group.get("output_activations") or not group.get("weights"):
        not_read("output_activations", group.get("output_activations"))
    form = group.get("format") or usual_format
    weights = mapping("weights", group["weights"])
    inputs = group.get("input_activations")
    inputs = mapping("input_activations", inputs) if inputs else None
    return Group(tuple(targets), _ct_scheme(weights, inputs, form))


def _ct_scheme(weights: Declared, inputs: Declared | None, form: object) -> LinearScheme:
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    strategy, activations = str(weights.get("strategy")), _ct_activations(inputs)
    if weights.get("dynamic"):
        not_read("dynamic", weights["dynamic"])
    dtype = _ct_dtype(weights)
    if kind == "int" and type(bits) is int and 2 <= bits <= 8:
        return _ct_integers(weights, bits, strategy, activations, form)
    block = BLOCK
    if not weights.get("symmetric", True):
        not_read("weights", dict(weights))
    if dtype == "fp8" and strategy == "block":
        block = block_of("block_structure", weights.get("block_structure"))
    scales = {"tensor": "1", "channel": "r 1", "block": "R C"}.get(strategy, "")
    facts = {"dtype": dtype, "strategy": strategy, "activations": activations, "scales": scales}
    return _form("compressed-tensors", {**facts, "size": size}, block=block)


def _ct_dtype(args: Declared) -> str:
    bits, kind, strategy = args.get("num_bits"), args.get("type"), args.get("strategy")
    size = args.get("group_size")
    if kind == "int":
        return f"int{bits}"
    if bits == 4:
        return {"tensor_group 16": "nvfp4", "group 32": "mxfp4"}.get(f"{strategy} {size}", "fp4")
    powers = strategy == "group" and size == 32 and "uint8" in str(args.get("scale_dtype"))
    return "mxfp8" if powers else "fp8"


def _ct_activations(inputs: Declared | None) -> str:
    """As in signatures: "token-dynamic" is FP8, other formats are named."""
    if not inputs:
        return "none"
    dtype = _ct_dtype(inputs)
    if dtype in ("nvfp4", "mxfp4", "mxfp8"):
        return dtype
    how = "dynamic" if inputs.get("dynamic") else "static"
    named = f"{inputs.get('strategy')}-{how}"
    return named if dtype == "fp8" else f"{dtype}-{named}"


def _ct_integers(
    weights: Declared, bits: int, strategy: str, activations: str, form: object
) -> LinearScheme:
    """Packed into words, or a byte for each value; ordered, inputs of a group stand anywhere."""
    size: Any = weights.get("group_size")
    if strategy not in ("group", "channel", "tensor"):
        not_read("strategy", strategy)
    if size is not None and (type(size) is not int or size < 1):
        not_read("group_size", size)
    if form not in ("pack-quantized", "int-quantized"):
        not_read("format", form)
    packed, symmetric = form == "pack-quantized", weights.get("symmetric", True)
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
    """Quark: one for every linear, and before it one for each pattern of `layer_quant_config`.

    `quark.py` of both engines, and what Quark 0.13 exports.
    """
    if declared.get("layer_type_quant_config"):
        not_read("layer_type_quant_config", declared["layer_type_quant_config"])
    layers = mapping("layer_quant_config", declared.get("layer_quant_config") or {})
    own = []
    for name, said in layers.items():
        expression = ".*".join(map(re.escape, name.split("*")))  # of a wildcard of shells
        own.append(Group((f"re:{expression}$",), _quark_section(name, said)))
    every = _quark_section("global_quant_config", declared.get("global_quant_config"))
    return (*own, Group(EVERY_LINEAR, every))


def quantizes_outputs(declared: Declared) -> bool:
    """Whether Quark's outputs or biases are to be quantized, but those of the KV cache."""
    cache = object_at(declared, "export").get("kv_cache_group")
    cache = cache if isinstance(cache, list) else []
    layers = object_at(declared, "layer_quant_config")
    sections = [said for name, said in layers.items() if name not in cache]
    sections.append(declared.get("global_quant_config"))
    return any(
        isinstance(said, Mapping) and (said.get("output_tensors") or said.get("bias"))
        for said in sections
    )


def _quark_section(key: str, said: object) -> LinearScheme:
    section = mapping(key, said)
    weight: Any = section.get("weight")
    inputs: Any = section.get("input_tensors")
    if isinstance(weight, list):
        return _form("quark", {"is_nvfp4": _is_nvfp4(weight) and _is_nvfp4(inputs), "weight": {}})
    weight = mapping("weight", weight)
    size, how = weight.get("group_size"), str(weight.get("qscheme")).removeprefix("per_")
    facts = {
        "is_nvfp4": False,
        "weight": weight,
        "how": how,
        "size": size,
        "is_sized": type(size) is int,
        "inputs": inputs,
        "activations": _quark_activations(inputs),
        "rows": "" if how == "tensor" else "r",
    }
    return _form("quark", facts)


def _quark_activations(inputs: Any) -> str:
    """As in signatures; "" where it is not known what engines make of them."""
    if not isinstance(inputs, Mapping):
        return "none" if inputs is None else ""
    dtype, dynamic = inputs.get("dtype"), bool(inputs.get("is_dynamic"))
    if dtype == "fp4" and inputs.get("group_size") == 32:
        return "mxfp4"
    if dtype == "int8" and not dynamic:
        return "int8-tensor-static"
    if dtype == "fp8_e4m3" and inputs.get("qscheme") != "per_channel":
        return "tensor-dynamic" if dynamic else "tensor-static"
    return "token-dynamic" if dtype == "fp8_e4m3" and dynamic else ""


def _is_nvfp4(stages: Any) -> bool:
    """FP4 in groups of 16, whose scales are FP8 under one of the matrix."""
    if not isinstance(stages, list) or len(stages) != 2:
        return False
    first, second = (mapping("weight", stage) for stage in stages)
    sizes = (first.get("dtype"), first.get("group_size"), second.get("dtype"))
    return sizes == ("fp4", 16, "fp8_e4m3") and bool(second.get("is_scale_quant"))


READERS: Mapping[str, Callable[[Declared], tuple[Group, ...]]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "blockwise_int8": _int8_blocks,
    "compressed-tensors": _compressed_tensors,
    "fp8": _plain_fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "quark": _quark,
    "w8a8_fp8": lambda _declared: _for_every(_form("w8a8_fp8", {})),
    "w8a8_int8": lambda _declared: _for_every(_form("w8a8_int8", {})),
}
"""quant_method -> the groups of a declaration. Raises NotReadError."""


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
    return Declaration(
        method=None if method is None else str(method),
        form=found.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        keys=raw,
        **_understood(found, str(method or ("modelopt" if algorithm else ""))),
    )


def _understood(found: RawDeclaration, method: str) -> dict[str, Any]:
    """As this package decodes it, else as engines take it besides; or the problem."""
    layout = LAYOUTS.get(method)
    if layout is None:  # whose excludes engines read in keys
        try:
            known = method in READERS
            return {"layout": method, "groups": READERS[method](found.value)} if known else {}
        except NotReadError as exc:
            return {"problem": f"{method}: {exc}"}
    try:
        scheme = read_scheme(found, layout=layout, strictness="engine")
        groups = tuple(Group(e.targets, of_declared(e)) for e in (scheme, *scheme.others))
        return {"layout": layout.name, "groups": groups, "excludes": scheme.excludes}
    except VerifyError as exc:
        problem = " ".join(str(exc).split())
    try:
        keys = ObjectReader(found.value, found.where, found.key, strictness="engine")
        excludes = layout.excludes(keys)
        groups = READERS[layout.name](found.value)
        return {"layout": layout.name, "groups": groups, "excludes": excludes}
    except (KeyError, NotReadError, VerifyError):
        return {"problem": problem}
