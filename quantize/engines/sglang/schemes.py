"""Which scheme class of SGLang 0.5.23 takes what is declared, and what it refuses.

Source: loading executed on faked sm90, sm100 and gfx942 (`tests/engines/RESULTS.md`), whose error
texts these are.
"""

from collections.abc import Mapping

from ...drafts.engine_traits import Finding
from ..contract import Scheme

_USE = "use FP8 per channel with dynamic tokens: recipe fp8-ptpc, or mi325x-fp8"
_NO_QUARK = Finding("init", "NotImplementedError: No quark compatible scheme was found.", _USE)
_NO_CT = Finding(
    "init", "NotImplementedError: No compressed-tensors compatible scheme was found.", _USE
)
_NO_MARLIN = Finding("after load", "NameError: name 'gptq_marlin_repack' is not defined", _USE)
_ROCM = "ValueError: {} quantization is currently not supported in ROCm."
_ONLY_REGULAR = (
    "ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found {!r}. Use the"
    " native 'mxfp8' quantization method for MXFP8 or ModelOptFp4Config for FP4."
)
_ONLY_FP4 = (
    "ValueError: ModelOpt currently only supports: FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4 quantizations"
    " in sglang. Please check the quantization config for your model's configuration."
)
_NO_SECTION = "ValueError: Cannot find any of ['quantization'] in the model's quantization config."
_TOO_OLD = (
    "ValueError: The quantization method mxfp8 is not supported for the current GPU. Minimum"
    " capability: 100. Current capability: 90."
)
_STORE = "store it in layout compressed-tensors or quark: draftquant transcode"
_ALGORITHMS = ("FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
_SCALE_INV = Finding(
    "wrong",
    "SGLang drops weight_scale: its linears have a weight_scale_inv, which stays uninitialised",
    _STORE,
)


def not_on_rocm(method: str) -> str:
    """Its error for a quant_method that it has for CUDA alone."""
    return _ROCM.format(method)


def algorithm_problem(algorithm: str, arch: str) -> Finding | None:
    """Why SGLang refuses an algorithm of ModelOpt by its name."""
    rocm = arch.startswith("gfx")
    if algorithm == "MXFP8":
        return Finding("config", _TOO_OLD, _STORE) if arch == "sm90" else None
    if algorithm == "MIXED_PRECISION" and rocm:
        return Finding("config", _ROCM.format("modelopt_mixed"), _STORE)
    if algorithm in _ALGORITHMS:
        return None  # on ROCm the row of the scheme says it
    if "FP4" in algorithm:
        text = _ROCM.format("modelopt_fp4") if rocm else _ONLY_FP4
    else:
        text = _NO_SECTION if rocm else _ONLY_REGULAR.format(algorithm)
    return Finding("config", text, _STORE)


_NEGATIVE = Finding(
    "init",
    "RuntimeError: Trying to create tensor with negative dimension -256: [-256, 128]",
    "quantize with groups of 128: recipe int4-group128",
)


def _modelopt(name: str, rocm: str) -> dict[str, Scheme]:
    refused = Finding("config", _ROCM.format(rocm), _USE)
    return {"*": Scheme(name), "gfx942": Scheme(name, refused)}


_NOT_QUARK = {"*": Scheme("QuarkLinearMethod", _NO_QUARK)}
_NOT_CT = {"*": Scheme("CompressedTensorsLinearMethod", _NO_CT)}
_TWO_STAGES = {
    "*": Scheme(
        "QuarkLinearMethod",
        Finding("init", "AttributeError: 'list' object has no attribute 'get'", _USE),
    )
}
_W8A8 = {"*": Scheme("QuarkW8A8Fp8")}
_CT_W8A8 = {"*": Scheme("CompressedTensorsW8A8Fp8")}
_FP8 = {"*": Scheme("Fp8LinearMethod")}
_WNA16 = {
    "*": Scheme("CompressedTensorsWNA16"),
    "gfx942": Scheme("CompressedTensorsWNA16", _NO_MARLIN),
}
_W8A16 = {
    "*": Scheme("CompressedTensorsW8A16Fp8"),
    "gfx942": Scheme("CompressedTensorsW8A16Fp8", _NO_MARLIN),
}
_ONE_GLOBAL_SCALE = (
    "ValueError: NVFP4 weight-only linear requires all fused projections to share one"
    " weight_global_scale"
)
_W4A16 = Scheme(
    "CompressedTensorsW4A16Fp4", None, _ONE_GLOBAL_SCALE, not_read=("input_global_scale",)
)
_W4A16_FP4 = {"*": _W4A16, "gfx942": _W4A16._replace(problem=_NO_MARLIN, not_read=())}

_GPTQ_REFUSED = {
    "*": Scheme(
        "GPTQMarlinConfig",
        Finding("config", "ValueError: Unknown quantization method: gptq.", _USE),
    )
}
_CUDA = ("sm80", "sm90", "sm100")
_MARLIN = dict.fromkeys(_CUDA, Scheme("GPTQMarlinLinearScheme"))
_NO_GPTQ = Finding("config", _ROCM.format("gptq_marlin"), _USE)
_GPTQ = {**_MARLIN, "gfx942": Scheme("GPTQMarlinConfig", _NO_GPTQ)}
_AUTO_AWQ = {
    **dict.fromkeys(_CUDA, Scheme("AWQMarlinLinearScheme")),
    "gfx942": Scheme("AWQLinearScheme"),
}
_NOT_CALLABLE = Finding("after load", "TypeError: 'NoneType' object is not callable", _USE)
_AUTO_AWQ_UNEVEN = {**_AUTO_AWQ, "gfx942": Scheme("AWQMarlinLinearScheme", _NOT_CALLABLE)}
_NO_OTHER_GPTQ = Finding(
    "init",
    "RuntimeError: The non-Marlin GPTQ CUDA kernel has been removed. Use"
    " quantization='gptq_marlin' (or a Marlin-compatible checkpoint) instead.",
    _USE,
)
_UNEVEN = {"*": Scheme("GPTQLinearScheme", _NO_OTHER_GPTQ)}
_AWQ = {"*": Scheme("AWQMarlinLinearScheme"), "gfx942": Scheme("AWQLinearScheme")}
_INT8 = {"*": Scheme("CompressedTensorsW8A8Int8")}
_GROUPS = ("group32", "group64", "group128")
_INTEGERS = ("int4", "int4+", "int8", "int8+")
_WHOLE_ROWS = ("channel", *_GROUPS)
SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    **{f"gptq int4 {size} none": _GPTQ for size in _WHOLE_ROWS},
    "gptq int8 group128 none": _GPTQ,
    **{
        f"gptq int{bits} {size} none": _GPTQ_REFUSED
        for bits in ("4+", "8+", "2", "3", "2+", "3+")
        for size in _WHOLE_ROWS
    },
    "auto-round int4 group32 none": _MARLIN,
    "auto-round int4 group128 none": _MARLIN,
    "auto-round int8 group128 none": _MARLIN,
    "auto-round int4+ group128 none": _UNEVEN,
    "auto-round awq-int4 group128 none": _AUTO_AWQ,
    "auto-round awq-int4+ group128 none": _AUTO_AWQ_UNEVEN,
    **{f"compressed-tensors int4 {size} none": _WNA16 for size in ("group16", "group256")},
    **{
        f"compressed-tensors {dtype} {size} none": _WNA16
        for dtype in _INTEGERS
        for size in ("channel", *_GROUPS)
    },
    **{
        f"compressed-tensors int8@ {size} int8-{how}": _INT8
        for size in ("channel", "tensor")
        for how in ("token-dynamic", "tensor-static")
    },
    "compressed-tensors int4@ group128 int8-token-dynamic": _NOT_CT,
    "compressed-tensors int4@ group128 token-dynamic": _NOT_CT,
    "compressed-tensors mxfp4 mxfp4": _NOT_CT,
    "compressed-tensors mxfp8 mxfp8": _NOT_CT,
    "compressed-tensors fp8 tensor tensor-dynamic": _CT_W8A8,
    **{f"quark {dtype} {size} none": _NOT_QUARK for dtype in ("int4", "uint4") for size in _GROUPS},
    "quark int8 tensor int8-tensor-static": _NOT_QUARK,
    "quark nvfp4 nvfp4": _TWO_STAGES,
    **{f"awq int4 {size} none": _AWQ for size in _GROUPS},
    **{f"awq int4= {size} none": {"*": Scheme("AWQLinearScheme")} for size in _GROUPS},
    "quark int4 channel none": _NOT_QUARK,
    "quark int4 channel token-dynamic": _NOT_QUARK,
    "quark int4 channel tensor-static": _NOT_QUARK,
    **dict.fromkeys(
        (
            "quark int4 channel+fp8 none",
            "quark int4 channel+fp8 token-dynamic",
            "quark int4 channel+fp8 tensor-static",
            "quark int4 channel+fp8 tensor-dynamic",
        ),
        _TWO_STAGES,
    ),
    "quark int4 group128 token-dynamic": _NOT_QUARK,
    "quark int4 group128 tensor-static": _NOT_QUARK,
    "quark fp8 channel none": _NOT_QUARK,
    "quark fp8 channel token-dynamic": _W8A8,
    "quark fp8 channel tensor-static": _W8A8,
    "quark fp8 tensor none": _NOT_QUARK,
    "quark fp8 tensor token-dynamic": _W8A8,
    "quark fp8 tensor tensor-static": _W8A8,
    "quark mxfp4 none": _NOT_QUARK,
    "quark mxfp4 token-dynamic": _NOT_QUARK,
    "quark mxfp4 tensor-static": _NOT_QUARK,
    "quark mxfp4 mxfp4": {"*": Scheme("QuarkW4A4MXFP4")},
    "modelopt fp8 tensor tensor-static": _modelopt("ModelOptFp8LinearMethod", "modelopt_fp8"),
    "modelopt mxfp8 mxfp8": {"*": Scheme("Fp8LinearMethod", _SCALE_INV)},
    "modelopt nvfp4 none": _modelopt("ModelOptNvFp4A16LinearMethod", "modelopt_fp4"),
    "modelopt nvfp4 nvfp4": _modelopt("ModelOptFp4LinearMethod", "modelopt_fp4"),
    "compressed-tensors int4 channel token-dynamic": _NOT_CT,
    "compressed-tensors int4 group128 token-dynamic": _NOT_CT,
    "compressed-tensors fp8 channel none": _W8A16,
    "compressed-tensors fp8 channel token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 channel tensor-static": _CT_W8A8,
    "compressed-tensors fp8 tensor none": _W8A16,
    "compressed-tensors fp8 tensor token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 tensor tensor-static": _CT_W8A8,
    "compressed-tensors fp8 block group-dynamic": _CT_W8A8,
    "compressed-tensors nvfp4 none": _W4A16_FP4,
    "compressed-tensors nvfp4 nvfp4": {
        **_W4A16_FP4,
        "sm100": Scheme("CompressedTensorsW4A4Fp4"),
    },
    "compressed-tensors mxfp4 none": _NOT_CT,
    "fp8 fp8 tensor token-dynamic": _FP8,
    "fp8 fp8 tensor tensor-static": _FP8,
    "fp8 fp8 block group-dynamic": _FP8,
    "awq int4 channel none": {
        "*": Scheme("AWQMarlinLinearScheme", whole_rows=True),
        "gfx942": Scheme("AWQLinearScheme", _NEGATIVE, whole_rows=True),
    },
}
_ZERO_DIM = "RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated"
_ONE_DIM = (
    "AssertionError: param.shape=torch.Size([1]) param.dtype=torch.float32"
    " loaded_weight.shape=torch.Size([2]) loaded_weight.dtype=torch.float32"
)
_SHAPES = (
    "AssertionError: param.shape=torch.Size([2]) param.dtype=torch.int64"
    " loaded_weight.shape=torch.Size([4]) loaded_weight.dtype=torch.int64"
)
_DROPPED = (
    "AssertionError: sglang/srt/layers/linear.py:894:"
    " assert param_data.shape == loaded_weight.shape"
)
_COLUMNS = "RuntimeError: Sizes of tensors must match except in dimension 0."
CONCATENATED: Mapping[str, str] = {
    "quark fp8 channel tensor-static": _ZERO_DIM,
    "quark fp8 tensor token-dynamic": _ZERO_DIM,
    "quark fp8 tensor tensor-static": _ZERO_DIM,
    "modelopt fp8 tensor tensor-static": _ZERO_DIM,
    "modelopt nvfp4 none": _DROPPED,
    "modelopt nvfp4 nvfp4": _DROPPED,
    **{
        f"compressed-tensors {dtype} {size} none": _SHAPES
        for dtype in _INTEGERS
        for size in ("channel", *_GROUPS)
    },
    "compressed-tensors fp8 tensor tensor-dynamic": _ONE_DIM,
    "compressed-tensors fp8 channel tensor-static": _ONE_DIM,
    "compressed-tensors fp8 tensor none": _ONE_DIM,
    "compressed-tensors fp8 tensor token-dynamic": _ONE_DIM,
    "compressed-tensors fp8 tensor tensor-static": _ONE_DIM,
    "compressed-tensors nvfp4 none": _ONE_DIM,
    "compressed-tensors nvfp4 nvfp4": _ONE_DIM,
    "fp8 fp8 tensor token-dynamic": _ZERO_DIM,
    "fp8 fp8 tensor tensor-static": _ZERO_DIM,
    **{
        f"{dtype} {size} none": _COLUMNS
        for dtype in ("gptq int4", "gptq int8", "auto-round int4", "auto-round int8")
        for size in _WHOLE_ROWS
    },
    **{f"awq {dtype} {size} none": _COLUMNS for dtype in ("int4", "int4=") for size in _GROUPS},
}
"""The MLA draft puts q_a and kv_a together along rows, whatever the tensor (`kimi_k25_eagle3.py`,
line 480): signature -> the error where one of the tensors has no such rows."""
