"""What people have: formats of many tools, drawn at random, for `foreign_mix.py`.

Shapes, names and keys are those that the tools write: GPTQModel 7.7 and AutoGPTQ, auto-round 0.15,
AutoAWQ and llm-awq, llm-compressor 0.14, ModelOpt, Quark, DeepSeek, torchao 0.18, bitsandbytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import kind_formats as kinds
from kind_formats import Shapes, Store, args
from tiny import Stored, store


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to store and declare a draft.

    Attributes:
        tool: whose it is.
        name: for the name of the folder.
        stored: how its linears are stored; None as floats.
        declared: its quantization_config.
        kept: leaves that stay floats, whatever is declared of them.
        others: leaf -> how that one is stored.
        cache: end of a name below `self_attn.` -> a tensor beside each attention.
        config: changes of config.json.
    """

    tool: str
    name: str
    stored: Store | None
    declared: Mapping[str, Any] | None
    kept: tuple[str, ...] = ("fc",)
    others: Mapping[str, Store] = field(default_factory=dict)
    cache: Mapping[str, Stored] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


Draw = Callable[[Random], Format]
_GROUPS = (32, 64, 128, 128, 128, -1)
_ODD_GROUPS = (16, 256)


def gptq(rng: Random) -> Format:
    """GPTQModel's and AutoGPTQ's keys: bits, orders, versions, rules by name."""
    bits = rng.choice((4, 4, 4, 4, 4, 8, 8, 2, 3, 5, 6))
    size = rng.choice((*_GROUPS, *_ODD_GROUPS))
    ordered = rng.random() < 0.2
    keys: dict[str, Any] = {
        "bits": bits,
        "group_size": size,
        "desc_act": ordered,
        "sym": rng.random() < 0.8,
        "lm_head": False,
        "quant_method": "gptq",
    }
    kept: tuple[str, ...] = ("fc",)
    rules = rng.choice(("none", "none", "fc", "fc", "down", "bits", "size"))
    dynamic: dict[str, Any] = dict(kinds.KEPT_FC) if rules != "none" else {}
    others: dict[str, Store] = {}
    if rules == "down":
        dynamic["-:.*down_proj$"] = {}
        kept = ("fc", "down_proj")
    elif rules == "bits":
        dynamic[rng.choice(("+:.*down_proj$", ".*down_proj.*"))] = {"bits": 8, "group_size": 32}
        others["down_proj"] = kinds.gptq(bits=8, size=32)
    elif rules == "size":
        dynamic["+:.*self_attn.*"] = {"group_size": 64}
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        others |= dict.fromkeys(names, kinds.gptq(bits=bits, size=64))
    if rng.random() < 0.6:
        version = rng.choice(("gptq", "gptq", "gptq_v2"))
        keys |= {
            "format": version,
            "checkpoint_format": version,
            "pack_dtype": "int32",
            "method": "gptq",
            "dynamic": dynamic or None,
            "meta": {"quantizer": ["gptqmodel:7.7.0"], "true_sequential": True, "mse": 0.0},
        }
        if rng.random() < 0.3:
            keys["meta"] |= {"act_group_aware": True, "static_groups": False}
    else:
        keys |= {
            "damp_percent": 0.01,
            "static_groups": rng.random() < 0.3,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
            "checkpoint_format": "gptq",
        }
        keys |= {"dynamic": dynamic} if dynamic else {}
        keys |= {"is_marlin_format": False} if rng.random() < 0.3 else {}
    if rng.random() < 0.1:
        keys["modules_in_block_to_quantize"] = [["self_attn.q_proj", "self_attn.k_proj"]]
    if rng.random() < 0.1:
        keys["quant_method"] = "gptq_marlin"
    g_idx = rng.random() < 0.8
    scales = rng.choice(("F16", "F16", "BF16"))
    name = f"{bits}-{size}{'-act' if ordered else ''}{'' if keys['sym'] else '-asym'}-{rules}"
    stored = kinds.gptq(bits=bits, size=size, g_idx=g_idx, scales=scales)
    return Format(tool="gptq", name=name, stored=stored, declared=keys, kept=kept, others=others)


def auto_round(rng: Random) -> Format:
    """auto-round's own form, and its exports as GPTQ and AWQ."""
    bits, size = rng.choice((4, 4, 4, 4, 8, 2, 3)), rng.choice(_GROUPS)
    symmetric = rng.random() < 0.75
    keys: dict[str, Any] = {
        "bits": bits,
        "data_type": "int",
        "group_size": size,
        "sym": symmetric,
        "iters": 200,
        "autoround_version": "0.15.1",
        "low_gpu_mem_usage": True,
    }
    form = rng.choice(("own", "own", "own", "own-awq", "gptq", "awq"))
    floats: dict[str, Any] = {"bits": 16, "data_type": "float"}
    kept: tuple[str, ...] = ("fc",)
    others: dict[str, Store] = {}
    stored = kinds.gptq(bits=bits, size=size, g_idx=False)
    if form.startswith("own"):
        kept_as = rng.choice(("extra", "extra", "regex", "blocks", "none", "mixed", "part"))
        keys |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        if kept_as in ("extra", "mixed", "part"):
            keys["extra_config"] = {"fc": floats, "model.fc": floats}
        if kept_as == "regex":
            keys["extra_config"] = {rng.choice((".*fc.*", "fc$", "model.fc|fc")): floats}
        if kept_as == "blocks":
            keys["block_name_to_quantize"] = rng.choice(
                ("model.layers", "layers", "midlayer", ["model.layers", "layers"])
            )
        if kept_as == "part":
            keys["extra_config"] |= {rng.choice((".*down_proj.*", "mlp.down_proj")): floats}
            kept = ("fc", "down_proj")
        if form == "own-awq":
            bits = 4
            keys |= {"bits": 4, "packing_format": "auto_round:auto_awq"}
            stored = kinds.awq(size=size)
        if kept_as == "mixed":
            mixed = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
            keys["extra_config"][rng.choice((".*down_proj.*", ".*o_proj.*"))] = mixed
            leaf = "down_proj" if ".*down_proj.*" in keys["extra_config"] else "o_proj"
            others[leaf] = kinds.gptq(bits=8, size=128, g_idx=False)
        name = f"{form}-{kept_as}"
    elif form == "gptq":
        keys |= {
            "quant_method": "gptq",
            "lm_head": False,
            "provider": "auto-round",
            "desc_act": False,
            "true_sequential": False,
            "damp_percent": 0.01,
        }
        stored = kinds.gptq(bits=bits, size=size)
        if rng.random() < 0.5:
            leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
            keys["modules_in_block_to_quantize"] = [[*leaves, "self_attn.o_proj", "mlp.gate_proj"]]
            kept = ("fc", "down_proj")
        name = form
    else:
        keys |= {
            "bits": 4,
            "quant_method": "awq",
            "provider": "auto-round",
            "zero_point": not symmetric,
            "version": "gemm",
            "modules_to_not_convert": rng.choice((["fc"], ["model.fc", "lm_head"], None)),
        }
        bits, stored = 4, kinds.awq(size=size)
        name = form
    name = f"{name}-{bits}-{size}{'' if symmetric else '-asym'}"
    return Format(
        tool="auto-round", name=name, stored=stored, declared=keys, kept=kept, others=others
    )


_KV_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "attention": ("k_scale", "v_scale"),
    "parts": ("k_proj.k_scale", "v_proj.v_scale"),
    "attn": ("attn.k_scale", "attn.v_scale"),
    "one": ("kv_scale",),
    "outputs": ("k_proj.output_scale", "v_proj.output_scale"),
    "outputs-q": ("q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"),
    "with-q": ("q_scale", "k_scale", "v_scale"),
    "prob": ("k_proj.output_scale", "v_proj.output_scale", "prob_output_scale"),
    "zeros": ("k_scale", "v_scale", "k_zero_point", "v_zero_point"),
    "fused": ("kv_proj.k_scale", "kv_proj.v_scale"),
}
_KV_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1,), (2,), (2, 1, 1))
_CT_IGNORE = (
    ["re:.*fc$", "re:.*lm_head$"],
    ["lm_head", "fc"],
    ["lm_head", "model.fc"],
    ["fc", "lm_head", "re:.*embed.*"],
    ["lm_head", "re:.*(fc|embed_tokens)$"],
)
_MODELOPT_EXCLUDE = (
    ["*fc*", "*lm_head*"],
    ["lm_head", "fc"],
    ["lm_head", "model.fc"],
    ["*lm_head*", "fc*"],
    ["lm_head*", "fc", "model.fc*"],
)
_FP8_LISTS = (["fc", "model.fc", "lm_head"], ["lm_head", "fc"], ["lm_head", "model.fc"], [])
_QUARK_EXCLUDE = (["*fc*", "*lm_head*"], ["fc", "lm_head"], ["re:.*fc$", "lm_head"])


def _modelopt(rng: Random, algorithm: str, **more: Any) -> dict[str, Any]:
    """Flat as its exporter writes config.json, or nested as its exporter of drafts."""
    excludes = rng.choice(_MODELOPT_EXCLUDE)
    producer = {"name": "modelopt", "version": "0.46.0"}
    form = rng.choice(("flat", "flat", "exclude", "nested"))
    if form == "nested":
        own = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": excludes}
        return {"producer": producer, "quantization": own | more}
    key = "ignore" if form == "flat" else "exclude_modules"
    keys = {"quant_method": "modelopt", "quant_algo": algorithm, key: excludes, **more}
    return keys | ({"producer": producer} if form == "flat" else {})


def _fp8_lists(rng: Random) -> dict[str, Any]:
    said = rng.choice(_FP8_LISTS)
    keys = rng.choice(
        (
            ("ignored_layers",),
            ("modules_to_not_convert",),
            ("ignored_layers", "modules_to_not_convert"),
        )
    )
    return dict.fromkeys(keys, said)


def quark_config(weight: Any, inputs: Any, exclude: list[str], **more: Any) -> dict[str, Any]:
    """As Quark exports it."""
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "exclude": exclude,
        "algo_config": None,
        "softmax_quant_spec": None,
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "version": "0.13",
        **more,
    }


def quark_spec(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    """One QTensorConfig."""
    return {
        "dtype": dtype,
        "qscheme": scheme,
        "is_dynamic": False,
        "symmetric": True,
        "observer_cls": "PerTensorMinMaxObserver",
        "scale_type": "float",
        "round_method": "half_even",
        "ch_axis": None,
        "group_size": None,
        "is_scale_quant": False,
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        **more,
    }


def kv_cache(rng: Random) -> Format:
    """FP8 linears, and scales of the KV cache in some spelling, declared or not."""
    spelling = rng.choice(tuple(_KV_SPELLINGS))
    shape = rng.choice(_KV_SHAPES)
    dtype = rng.choice(("F32", "F32", "BF16"))
    values = 0.02 + 0.0 * sum(shape)
    import numpy as np

    one = store(np.full(shape, values), dtype)
    cache = {
        end: Stored("I32", (), b"\0\0\0\0") if "zero" in end else one
        for end in _KV_SPELLINGS[spelling]
    }
    tool = rng.choice(("fp8", "compressed-tensors", "modelopt", "quark", "none"))
    declared_too = rng.random() < 0.6
    stored: Store | None
    keys: dict[str, Any] | None
    if tool == "fp8":
        stored, keys = kinds.fp8, kinds.declared_fp8(**_fp8_lists(rng))
        if declared_too:
            keys["kv_cache_scheme"] = "static"
    elif tool == "compressed-tensors":
        stored = kinds.fp8_tokens
        tokens = args("float", 8, "token", dynamic=True)
        per_head = {**kinds.KV_FP8, "strategy": "attn_head"} if len(shape) > 1 else kinds.KV_FP8
        keys = kinds.declared_ct(
            args("float", 8, "channel"),
            tokens,
            "float-quantized",
            ignore=tuple(rng.choice(_CT_IGNORE)),
            kv_cache_scheme=per_head if declared_too else None,
        )
    elif tool == "modelopt":
        stored = kinds.fp8
        keys = _modelopt(rng, "FP8")
        if declared_too:
            keys.get("quantization", keys)["kv_cache_quant_algo"] = "FP8"
            if "quantization" not in keys and rng.random() < 0.6:
                keys["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    elif tool == "quark":
        stored = kinds.fp8
        spec = quark_spec("fp8_e4m3", "per_tensor")
        more: dict[str, Any] = {}
        if declared_too:
            outputs = {"weight": spec, "input_tensors": spec, "output_tensors": spec, "bias": None}
            more["kv_cache_quant_config"] = {"*k_proj": outputs, "*v_proj": outputs}
            if rng.random() < 0.7:
                more["layer_quant_config"] = {"*k_proj": outputs, "*v_proj": outputs}
        keys = quark_config(spec, spec, rng.choice(_QUARK_EXCLUDE), **more)
        if "layer_quant_config" in more and rng.random() < 0.7:
            keys["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    else:
        stored, keys = None, None
    name = f"{tool}-{spelling}{'' if keys and declared_too else '-undeclared'}-{len(shape)}d"
    return Format(tool="kv-cache", name=name, stored=stored, declared=keys, cache=cache)


def _blocks(rows: int, columns: int, block: tuple[int, int], suffix: str, dtype: str) -> Shapes:
    scales = (-(-rows // block[0]), -(-columns // block[1]))
    return {"weight": ("F8_E4M3", (rows, columns)), suffix: (dtype, scales)}


def fp8_blocks(rng: Random) -> Format:
    """Blocks of 128, 64 and 1 x 128, powers of two, no declared activation scheme."""
    block = rng.choice(((128, 128), (128, 128), (128, 128), (64, 64), (1, 128), (32, 32)))
    suffix = rng.choice(
        ("weight_scale_inv", "weight_scale_inv", "weight_scale_inv", "weight_scale")
    )
    dtype = rng.choice(("F32", "F32", "BF16", "F8_E8M0"))
    form = rng.choice(("fp8", "fp8", "fp8", "fp8", "ct", "modelopt"))
    keys: dict[str, Any]
    if form == "fp8":
        keys = kinds.declared_blocks(weight_block_size=list(block), **_fp8_lists(rng))
        how = rng.choice(("", "", "ue8m0", "no-scheme", "no-fmt", "float"))
        if how == "ue8m0":
            keys["scale_fmt"] = "ue8m0"
        elif how == "float":
            keys["scale_fmt"] = "float"
        elif how == "no-scheme":
            del keys["activation_scheme"]
        elif how == "no-fmt":
            del keys["fmt"]
        name = f"{block[0]}x{block[1]}-{suffix}-{dtype}-{how}"
    elif form == "ct":
        suffix = "weight_scale"
        weights = args("float", 8, "block", block_structure=list(block))
        inputs = args("float", 8, "group", group_size=block[1], dynamic=True)
        ignore = tuple(rng.choice(_CT_IGNORE))
        keys = kinds.declared_ct(weights, inputs, "float-quantized", ignore=ignore)
        name = f"ct-{block[0]}x{block[1]}-{dtype}"
    else:
        keys = _modelopt(rng, "FP8_PB_WO")
        block, dtype = (128, 128), "F32"
        name = "modelopt-pb-wo"
        return Format(
            tool="fp8-blocks",
            name=name,
            stored=lambda rows, columns: {
                "weight": ("F8_E4M3", (rows, columns)),
                "weight_scale": ("F32", (-(-rows // 128), 1, -(-columns // 128), 1)),
            },
            declared=keys,
        )
    return Format(
        tool="fp8-blocks",
        name=name,
        stored=lambda rows, columns: _blocks(rows, columns, block, suffix, dtype),
        declared=keys,
    )


def fp8_plain(rng: Random) -> Format:
    """One scale for a matrix: static, dynamic or undeclared inputs, and per channel."""
    how = rng.choice(("static", "dynamic", "no-scheme", "channel", "fbgemm", "w8a8", "modelopt"))
    shape = rng.choice(((), (), (1,)))
    dtype = rng.choice(("F32", "F32", "BF16"))
    static = rng.random() < 0.5 if how == "no-scheme" else how in ("static", "modelopt")

    def stored(rows: int, columns: int) -> Shapes:
        scale = (rows, 1) if how in ("channel", "fbgemm", "w8a8") else shape
        found = {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": (dtype, scale)}
        return found | ({"input_scale": (dtype, shape)} if static else {})

    keys: dict[str, Any] = {"quant_method": "fp8", **_fp8_lists(rng)}
    if how in ("static", "dynamic"):
        keys["activation_scheme"] = how
    elif how == "channel":
        keys["activation_scheme"] = "dynamic"
    elif how == "fbgemm":
        keys = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
        keys["modules_to_not_convert"] = ["fc", "model.fc", "lm_head"]
    elif how == "w8a8":
        keys = {"quant_method": rng.choice(("w8a8_fp8", "ptpc_fp8"))}
    elif how == "modelopt":
        keys = _modelopt(rng, "FP8")
    name = f"{how}{'' if shape == () else '-1d'}-{dtype}"
    return Format(tool="fp8", name=name, stored=stored, declared=keys)


def _packed(bits: int, size: int, *, symmetric: bool, ordered: bool) -> Store:
    def shapes(rows: int, columns: int) -> Shapes:
        groups = columns // size if size > 0 else 1
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight_packed": ("I32", (rows, -(-columns * bits // 32))),
            "weight_scale": ("BF16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        if not symmetric:
            found["weight_zero_point"] = ("I32", (-(-rows * bits // 32), groups))
        if ordered:
            found["weight_g_idx"] = ("I32", (columns,))
        return found

    return shapes


def ct_integers(rng: Random) -> Format:
    """compressed-tensors' weights in 4 and 8 bits: groups, zero points, orders."""
    bits = rng.choice((4, 4, 4, 4, 8, 8, 2, 3))
    size = rng.choice((16, 32, 64, 128, 256, -1))
    symmetric = rng.random() < 0.65
    order = rng.choice((None, None, None, "weight", "group", "static", "dynamic"))
    how = {"group_size": size} if size > 0 else {}
    strategy = "group" if size > 0 else "channel"
    weights = args("int", bits, strategy, **how) | {"symmetric": symmetric, "actorder": order}
    keys = kinds.declared_ct(weights, None, "pack-quantized", ignore=tuple(rng.choice(_CT_IGNORE)))
    name = f"w{bits}-{size}{'' if symmetric else '-asym'}{f'-{order}' if order else ''}"
    ordered = order in ("group", "dynamic")
    stored = _packed(bits, size, symmetric=symmetric, ordered=ordered)
    return Format(tool="ct-int", name=name, stored=stored, declared=keys)


def int8(rng: Random) -> Format:
    """W8A8 and W8A16 in a byte each, by compressed-tensors, Quark, ModelOpt and others."""
    form = rng.choice(
        (
            "ct-dynamic",
            "ct-static",
            "ct-w8a16",
            "ct-asym",
            "w8a8_int8",
            "modelopt",
            "blockwise_int8",
            "quark",
            "experts_int8",
        )
    )
    scales = rng.choice(("channel", "tensor")) if form in ("ct-dynamic", "ct-static") else "channel"
    static = form in ("ct-static", "quark")
    asym = form == "ct-asym"

    def stored(rows: int, columns: int) -> Shapes:
        scale = (rows, 1) if scales == "channel" else (1,)
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight": ("I8", (rows, columns)),
            "weight_scale": (
                "BF16" if form != "quark" else "F32",
                () if form == "quark" else scale,
            ),
        }
        if form == "blockwise_int8":
            found = {
                "weight": ("I8", (rows, columns)),
                "weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128))),
            }
        if form == "modelopt":
            found["weight_scale"] = ("F32", (rows,))
        if static:
            found["input_scale"] = ("F32", () if form == "quark" else (1,))
        if asym and rng_static:
            found["input_scale"] = ("F32", (1,))
            found["input_zero_point"] = ("I8", (1,))
        if form == "quark":
            found["weight_zero_point"] = ("I8", ())
        return found

    rng_static = rng.random() < 0.4
    keys: dict[str, Any]
    if form.startswith("ct"):
        inputs: dict[str, Any] | None = args("int", 8, "token", dynamic=True)
        if static:
            inputs = args("int", 8, "tensor")
        if asym:
            inputs = args("int", 8, "tensor" if rng_static else "token", dynamic=not rng_static)
            inputs["symmetric"] = False
        if form == "ct-w8a16":
            inputs = None
        keys = kinds.declared_ct(
            args("int", 8, scales), inputs, "int-quantized", ignore=tuple(rng.choice(_CT_IGNORE))
        )
    elif form == "quark":
        spec = quark_spec("int8", "per_tensor")
        keys = quark_config(spec, spec, rng.choice(_QUARK_EXCLUDE))
    elif form == "modelopt":
        keys = _modelopt(rng, rng.choice(("INT8_SQ", "W8A16", "INT8_WO")))
    elif form == "blockwise_int8":
        keys = {
            "quant_method": form,
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    else:
        keys = {"quant_method": form}
    return Format(tool="int8", name=f"{form}-{scales}", stored=stored, declared=keys)


def awq(rng: Random) -> Format:
    """AutoAWQ's and llm-awq's keys, awq_marlin, versions, groups and lists."""
    size = rng.choice((32, 64, 128, 128, 128, -1, 16, 256))
    keys: dict[str, Any] = {
        "quant_method": rng.choice(("awq", "awq", "awq", "awq_marlin", "awq_gemm")),
        "zero_point": rng.random() < 0.85,
        "version": rng.choice(("gemm", "GEMM", "gemv", "marlin")),
    }
    keys |= rng.choice(
        (
            {"bits": 4, "group_size": size},
            {"bits": 4, "group_size": size},
            {"w_bit": 4, "q_group_size": size},
            {"bits": 4, "group_size": size, "w_bit": 4, "q_group_size": size, "backend": "autoawq"},
        )
    )
    lists: tuple[Any, ...] = ("no", None, ["fc"], ["fc", "lm_head"], ["model.fc", "lm_head"], [])
    said = rng.choice(lists)
    if said != "no":
        keys["modules_to_not_convert"] = said
    half = {"torch_dtype": "float16"} if rng.random() < 0.4 else {}
    name = f"{keys['quant_method']}-{size}-{'w_bit' if 'bits' not in keys else 'bits'}"
    return Format(tool="awq", name=name, stored=kinds.awq(size=size), declared=keys, config=half)


def _without_input(rows: int, columns: int) -> Shapes:
    """ModelOpt's weight-only NVFP4."""
    found = dict(kinds.modelopt_nvfp4(rows, columns))
    del found["input_scale"]
    return found


def _with_pre_scale(rows: int, columns: int) -> Shapes:
    """ModelOpt's NVFP4 after AWQ."""
    return {**kinds.modelopt_nvfp4(rows, columns), "pre_quant_scale": ("BF16", (columns,))}


def _codes_in_bytes(rows: int, columns: int) -> Shapes:
    """Quark's MXFP4."""
    return {"weight": ("U8", (rows, columns // 2)), "weight_scale": ("U8", (rows, columns // 32))}


def fp4(rng: Random) -> Format:
    """NVFP4, MXFP4 and MXFP8 under the names that ModelOpt, llm-compressor and Quark give them."""
    form = rng.choice(
        (
            "modelopt",
            "modelopt_fp4",
            "awq",
            "modelopt_mxfp8",
            "mxfp8",
            "w4a16",
            "ct",
            "ct-a16",
            "ct-mxfp4",
            "ct-mxfp8",
            "quark",
            "auto-round-mx",
        )
    )
    named = {
        "modelopt": "NVFP4",
        "modelopt_fp4": "NVFP4",
        "awq": "NVFP4_AWQ",
        "w4a16": "W4A16_NVFP4",
    }

    def micro(rows: int, columns: int) -> Shapes:
        return {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("U8", (rows, columns // 32)),
        }

    def mxfp4(rows: int, columns: int) -> Shapes:
        return {
            "weight_packed": ("U8", (rows, columns // 2)),
            "weight_scale": ("U8", (rows, columns // 32)),
        }

    kept: tuple[str, ...] = ("fc",)
    stored: Store
    if form in named:
        keys = _modelopt(rng, named[form], group_size=16)
        stored = {"w4a16": _without_input, "awq": _with_pre_scale}.get(form, kinds.modelopt_nvfp4)
        if form == "modelopt_fp4":
            keys = {**keys, "quant_method": form}
    elif form in ("modelopt_mxfp8", "mxfp8"):
        keys = _modelopt(rng, "MXFP8", group_size=32)
        if form == "modelopt_mxfp8":
            keys["quant_method"] = form
        elif rng.random() < 0.5:
            keys = {"quant_method": "mxfp8", **_fp8_lists(rng)}
        stored = micro
    elif form == "ct-mxfp8":
        scale = {"group_size": 32, "scale_dtype": "torch.uint8"}
        weights = args("float", 8, "group", **scale)
        keys = kinds.declared_ct(
            weights,
            rng.choice((None, {**weights, "dynamic": True})),
            "mxfp8-quantized",
            ignore=tuple(rng.choice(_CT_IGNORE)),
        )
        stored = micro
    elif form == "ct-mxfp4":
        scale = {"group_size": 32, "scale_dtype": "torch.uint8"}
        weights = args("float", 4, "group", **scale)
        keys = kinds.declared_ct(
            weights,
            rng.choice((None, {**weights, "dynamic": True})),
            "mxfp4-pack-quantized",
            ignore=tuple(rng.choice(_CT_IGNORE)),
        )
        stored = mxfp4
    elif form == "quark":
        spec = quark_spec(
            "fp4",
            "per_group",
            group_size=32,
            scale_format="e8m0",
            ch_axis=-1,
            scale_calculation_mode="even",
        )
        inputs = rng.choice((None, {**spec, "is_dynamic": True}))
        keys = quark_config(spec, inputs, rng.choice(_QUARK_EXCLUDE))
        stored = _codes_in_bytes
    elif form == "auto-round-mx":
        keys = {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "mx_fp",
            "act_bits": 4,
            "act_data_type": "mx_fp",
            "act_group_size": 32,
            "act_sym": True,
            "act_dynamic": True,
            "packing_format": "auto_round:llm_compressor",
            "extra_config": {"fc": {"bits": 16}, "model.fc": {"bits": 16}},
        }
        stored = mxfp4
    else:
        weights = args("float", 4, "tensor_group", group_size=16)
        inputs = {**weights, "dynamic": "local"} if form == "ct" else None
        keys = kinds.declared_ct(
            weights, inputs, "nvfp4-pack-quantized", ignore=tuple(rng.choice(_CT_IGNORE))
        )
        stored = kinds.nvfp4(inputs=form == "ct")
    return Format(tool="fp4", name=form, stored=stored, declared=keys, kept=kept)


def transforms(rng: Random) -> Format:
    """llm-compressor's declared Hadamard transforms: fused into the weights, or applied online."""
    bits = rng.choice((4, 8))
    weights = args("int", 4, "group", group_size=128)
    stored = kinds.packed()
    form, inputs = "pack-quantized", None
    if bits == 8:
        weights, stored, form = args("float", 8, "channel"), kinds.fp8_tokens, "float-quantized"
        inputs = args("float", 8, "token", dynamic=True)
    where = rng.choice((["weight_output", "weight_input"], ["input", "weight_input"]))
    apply = [
        {"targets": ["re:.*o_proj$"], "location": place, "inverse": place != "input", "ignore": []}
        for place in where
    ]
    config = {
        "config_groups": {
            "R4": {
                "type": "hadamard",
                "apply": apply,
                "randomize": False,
                "requires_grad": False,
                "head_dim": None,
            }
        }
    }
    form_of = rng.choice(("set", "set", "set", "empty", "sparsity"))
    more: dict[str, Any] = {"transform_config": config}
    if form_of == "empty":
        more = {"transform_config": {}, "sparsity_config": {}}
    elif form_of == "sparsity":
        more = {
            "transform_config": {},
            "sparsity_config": {
                "format": "dense",
                "targets": [],
                "ignore": [],
                "sparsity_structure": "unstructured",
                "global_sparsity": 0.0,
            },
        }
    ignore = tuple(rng.choice(_CT_IGNORE))
    keys = kinds.declared_ct(weights, inputs, form, ignore=ignore, **more)
    return Format(tool="transforms", name=f"{form_of}-{bits}", stored=stored, declared=keys)


def mixed(rng: Random) -> Format:
    """Attention in one format, the MLP in another."""
    tokens = args("float", 8, "token", dynamic=True)
    fp8, int4 = args("float", 8, "channel"), args("int", 4, "group", group_size=128)
    names = ("gate_proj", "up_proj", "down_proj")
    form = rng.choice(("ct", "ct-classes", "ct-down", "modelopt", "quark", "ct-none"))
    if form.startswith("ct"):
        mlp = {"ct-down": ["re:.*down_proj"]}.get(form, ["re:.*mlp.*"])
        rest = {"ct": ["re:.*self_attn.*"], "ct-none": ["re:.*self_attn.*"]}.get(form, ["Linear"])
        names = ("down_proj",) if form == "ct-down" else names
        groups = {
            "group_0": {
                "targets": mlp,
                "weights": int4,
                "input_activations": None,
                "format": "pack-quantized",
            },
            "group_1": {
                "targets": rest,
                "weights": fp8,
                "input_activations": tokens,
                "format": "float-quantized",
            },
        }
        if form == "ct-none":
            del groups["group_0"]
        keys: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": groups,
            "ignore": rng.choice(_CT_IGNORE),
            "quantization_status": "compressed",
        }
        others = dict.fromkeys(names, kinds.packed()) if form != "ct-none" else {}
        kept = ("fc", *names) if form == "ct-none" else ("fc",)
        return Format(
            tool="mixed",
            name=form,
            stored=kinds.fp8_tokens,
            declared=keys,
            others=others,
            kept=kept,
        )
    if form == "modelopt":
        layers = {}
        for root in ("midlayer", "layers.0", "model.layers.0", "model.layers.1", "layers.1"):
            for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
                layers[f"{root}.self_attn.{leaf}"] = {"quant_algo": "FP8"}
            for leaf in names:
                layers[f"{root}.mlp.{leaf}"] = {"quant_algo": "NVFP4", "group_size": 16}
        keys = _modelopt(rng, "MIXED_PRECISION", quantized_layers=layers)
        return Format(
            tool="mixed",
            name=form,
            stored=kinds.fp8,
            declared=keys,
            others=dict.fromkeys(names, kinds.modelopt_nvfp4),
        )
    spec = quark_spec("fp8_e4m3", "per_tensor")
    fp4 = quark_spec(
        "fp4",
        "per_group",
        group_size=32,
        scale_format="e8m0",
        ch_axis=-1,
        scale_calculation_mode="even",
    )
    own = {
        "weight": fp4,
        "input_tensors": {**fp4, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }
    keys = quark_config(
        spec,
        spec,
        rng.choice(_QUARK_EXCLUDE),
        layer_quant_config={rng.choice(("*mlp*", "*.mlp.*")): own},
    )
    return Format(
        tool="mixed",
        name=form,
        stored=kinds.fp8,
        declared=keys,
        others=dict.fromkeys(names, _codes_in_bytes),
    )


def saved_by_others(rng: Random) -> Format:
    """bitsandbytes, torchao, HQQ, EETQ, FP-Quant, AQLM and their kin, as they are saved."""
    form = rng.choice(
        (
            "bnb-nf4",
            "bnb-nf4",
            "bnb-int8",
            "torchao",
            "torchao",
            "torchao-flat",
            "hqq",
            "eetq",
            "fp_quant",
            "aqlm",
            "vptq",
            "higgs",
            "gguf",
            "ipex",
            "marlin",
            "mxfp4",
        )
    )

    def four(rows: int, columns: int) -> Shapes:
        return {
            "weight": ("U8", (rows * columns // 2, 1)),
            "weight.absmax": ("U8", (rows * columns // 64,)),
            "weight.nested_absmax": ("F32", (max(1, rows * columns // 64 // 256),)),
            "weight.nested_quant_map": ("F32", (256,)),
            "weight.quant_map": ("F32", (16,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
        }

    def eight(rows: int, columns: int) -> Shapes:
        return {
            "weight": ("I8", (rows, columns)),
            "SCB": ("F32", (rows,)),
            "weight_format": ("U8", ()),
        }

    def flat(rows: int, columns: int) -> Shapes:
        return {
            "_weight_qdata": ("I8", (rows, columns)),
            "_weight_scale": ("BF16", (rows, columns // 128)),
            "_weight_zero_point": ("I8", (rows, columns // 128)),
        }

    def plain(rows: int, columns: int) -> Shapes:
        return {"weight": ("I8", (rows, columns)), "weight_scale": ("BF16", (rows,))}

    bnb = {
        "_load_in_4bit": form == "bnb-nf4",
        "_load_in_8bit": form == "bnb-int8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": rng.choice((None, ["fc", "lm_head"])),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": form == "bnb-nf4",
        "load_in_8bit": form == "bnb-int8",
        "quant_method": "bitsandbytes",
    }
    tao = {
        "quant_method": "torchao",
        "quant_type": {
            "default": {
                "_type": "Int8WeightOnlyConfig",
                "_version": 2,
                "_data": {"group_size": None},
            }
        },
        "quant_type_kwargs": {},
        "modules_to_not_convert": rng.choice((None, ["fc", "lm_head"])),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    table: dict[str, tuple[Store, dict[str, Any] | None]] = {
        "bnb-nf4": (four, bnb),
        "bnb-int8": (eight, bnb),
        "torchao": (flat, tao),
        "torchao-flat": (flat, None),
    }
    stored, keys = table.get(form, (plain, {"quant_method": form, "bits": 4, "group_size": 64}))
    return Format(tool="others", name=form, stored=stored, declared=keys)


def unquantized(rng: Random) -> Format:
    """Nothing quantized; now and then an empty or foreign key."""
    keys = rng.choice((None, None, None, None, {}))
    return Format(tool="unquantized", name="bf16", stored=None, declared=keys)


DRAWS: Mapping[str, tuple[Draw, int]] = {
    "gptq": (gptq, 42),
    "auto-round": (auto_round, 36),
    "kv-cache": (kv_cache, 42),
    "fp8-blocks": (fp8_blocks, 32),
    "fp8": (fp8_plain, 18),
    "ct-int": (ct_integers, 26),
    "int8": (int8, 18),
    "awq": (awq, 20),
    "fp4": (fp4, 24),
    "transforms": (transforms, 8),
    "mixed": (mixed, 14),
    "others": (saved_by_others, 14),
    "unquantized": (unquantized, 24),
}
"""Kind -> how it is drawn, and how many of 318."""
