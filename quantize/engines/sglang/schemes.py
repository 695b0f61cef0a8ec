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
_STORE = "store it in layout compressed-tensors or quark: draftquant transcode"
_SCALE_INV = Finding(
    "wrong",
    "SGLang drops weight_scale: its linears have a weight_scale_inv, which stays uninitialised",
    _STORE,
)


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
_W8A8 = {"*": Scheme("QuarkW8A8Fp8"), "sm80": Scheme("QuarkLinearMethod", _NO_QUARK)}
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
_SM80 = "sm80"
_MARLIN = {"*": Scheme("GPTQMarlinLinearScheme")}
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
_SPARSE = {
    "*": Scheme(
        "CompressedTensorsConfig",
        Finding(
            "init",
            "ImportError: Other method (CompressedTensorsW4A16Sparse24) is not supported now",
            _USE,
        ),
    )
}
_NO_BLOCKS = Finding(
    "init",
    "ValueError: Unsupported weight strategy=block, supported strategies are"
    " [<QuantizationStrategy.CHANNEL: 'channel'>, <QuantizationStrategy.TENSOR: 'tensor'>]",
    _USE,
)
_BITS = range(2, 9)
_ONE_GROUP = {"*": Scheme("AWQLinearScheme", _NEGATIVE, whole_rows=True)}
_AWQ = {"*": Scheme("AWQMarlinLinearScheme"), "gfx942": Scheme("AWQLinearScheme")}
_INT8 = {"*": Scheme("CompressedTensorsW8A8Int8")}
_GROUPS = ("group32", "group64", "group128")
_INTEGERS = ("int4", "int4+", "int8", "int8+")
_WHOLE_ROWS = ("channel", *_GROUPS)
_EVERY_GROUP = ("group16", *_WHOLE_ROWS, "group256")
_SIZES = (16, 32, 64, 128, 256)
_ORDERED = "ValueError: 1 validation error for QuantizationArgs: Must use group or tensor_group"
_NO_ORDER = {
    "*": Scheme(
        "CompressedTensorsConfig",
        Finding("config", f"{_ORDERED} quantization strategy for activation ordering", _USE),
    )
}
SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    **{
        f"gptq int{bits}{mark} {size} none": _GPTQ_REFUSED
        for bits in _BITS
        for mark in ("", "+")
        for size in (*_EVERY_GROUP, *(f"ordered{size}" for size in _SIZES))
    },
    **{
        f"gptq int{bits} {size} none": _GPTQ
        for bits in (4, 8)
        for size in (*_WHOLE_ROWS, "ordered32", "ordered64", "ordered128")
    },
    **{
        f"auto-round int{bits}{mark} {size} none": _UNEVEN
        for bits in (2, 3, 4, 8)
        for mark in ("", "+")
        for size in _EVERY_GROUP
    },
    **{f"auto-round int{bits} {size} none": _MARLIN for bits in (4, 8) for size in _WHOLE_ROWS},
    **{f"auto-round awq-int4 {size} none": _AUTO_AWQ for size in _GROUPS},
    **{f"auto-round awq-int4+ {size} none": _AUTO_AWQ_UNEVEN for size in _GROUPS},
    "auto-round awq-int4 channel none": _ONE_GROUP,
    "auto-round awq-int4+ channel none": {"*": Scheme("AWQMarlinLinearScheme", whole_rows=True)},
    **{
        f"compressed-tensors int{bits}{mark} {size} none": _SPARSE
        for bits in _BITS
        for mark in ("", "+")
        for size in (*_EVERY_GROUP, *(f"ordered{size}" for size in _SIZES))
    },
    **{
        f"compressed-tensors {dtype} {size} none": _WNA16
        for dtype in _INTEGERS
        for size in (*_EVERY_GROUP, *(f"ordered{size}" for size in _SIZES))
    },
    **{
        f"compressed-tensors int{bits}{mark} ordered none": _NO_ORDER
        for bits in _BITS
        for mark in ("", "+")
    },
    "compressed-tensors int8@ channel none": _SPARSE,
    "w8a8_fp8 fp8 channel token-dynamic": {"*": Scheme("W8A8Fp8LinearMethod")},
    "w8a8_int8 int8@ channel int8-token-dynamic": {"*": Scheme("W8A8Int8LinearMethod")},
    "blockwise_int8 int8@ block int8-group-dynamic": {"*": Scheme("BlockInt8LinearMethod")},
    **{
        f"compressed-tensors int8@ {size} int8-{how}": _INT8
        for size in ("channel", "tensor")
        for how in ("token-dynamic", "tensor-static")
    },
    "compressed-tensors int4@ group128 int8-token-dynamic": _NOT_CT,
    "compressed-tensors int4@ group128 token-dynamic": _NOT_CT,
    "compressed-tensors mxfp4 mxfp4": _NOT_CT,
    "compressed-tensors mxfp8 mxfp8": _NOT_CT,
    "compressed-tensors mxfp8 none": _NOT_CT,
    "compressed-tensors fp8 tensor tensor-dynamic": _CT_W8A8,
    **{f"quark {dtype} {size} none": _NOT_QUARK for dtype in ("int4", "uint4") for size in _GROUPS},
    "quark int8 tensor int8-tensor-static": _NOT_QUARK,
    "quark nvfp4 nvfp4": _TWO_STAGES,
    **{f"awq int4 {size} none": _AWQ for size in (*_GROUPS, "group16", "group256")},
    **{
        f"awq int4= {size} none": {"*": Scheme("AWQLinearScheme")}
        for size in (*_GROUPS, "group16", "group256")
    },
    "awq int4= channel none": _ONE_GROUP,
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
    "compressed-tensors fp8 block group-dynamic": {
        **_CT_W8A8,
        _SM80: Scheme("CompressedTensorsW8A16Fp8", _NO_BLOCKS),
    },
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
        f"auto-round awq-int4{mark} {size} none": _COLUMNS
        for mark in ("", "+")
        for size in _WHOLE_ROWS
    },
    **{
        f"{method} int{bits}{mark} {size} none": _COLUMNS
        for method in ("gptq", "auto-round")
        for bits in _BITS
        for mark in ("", "+")
        for size in (*_EVERY_GROUP, *(f"ordered{size}" for size in _SIZES))
    },
    **{f"awq {dtype} {size} none": _COLUMNS for dtype in ("int4", "int4=") for size in _GROUPS},
}
"""The MLA draft puts q_a and kv_a together along rows, whatever the tensor (`kimi_k25_eagle3.py`,
line 480): signature -> the error where one of the tensors has no such rows."""
