"""Which scheme class of vLLM 0.33.0 takes what is declared, and what it refuses.

Source: loading executed on faked sm90 and sm100 (`tests/engines/RESULTS.md`), whose error texts
these are.
"""

from collections.abc import Mapping

from ...drafts.engine_traits import Finding
from ..contract import Scheme

_USE_QUARK = "use FP8 per channel with dynamic tokens: recipe mi325x-fp8, or fp8-ptpc"
_USE_CT = "use int4 without activations (recipe int4-channel), or FP8 (fp8-ptpc)"
_NO_QUARK = Finding(
    "init", "NotImplementedError: No quark compatible scheme was found.", _USE_QUARK
)
_NO_GROUP = Finding(
    "init",
    "ValueError: Quark W4A16 weight.group_size must be a positive int, got None",
    _USE_QUARK,
)
_NO_ACTIVATIONS = Finding(
    "init",
    "ValueError: Unsupported activation quant key:"
    " QuantKey(f8e4m3fn,scale(f32,dynamic,per_tensor),symmetric)",
    "quantize without activations, or with MXFP4 ones: recipe mi355-mxfp4",
)
_NO_CT = Finding(
    "init", "NotImplementedError: No compressed-tensors compatible scheme was found", _USE_CT
)
_TWO_STAGES = {
    "*": Scheme(
        "QuarkLinearMethod",
        Finding(
            "init",
            "NotImplementedError: Multi-entry weight or activation quantization configs are only"
            " supported for NVFP4.",
            _USE_QUARK,
        ),
    )
}
_TOO_OLD = Finding(
    "init",
    "RuntimeError: Quantization scheme is not supported for the current GPU. Min capability: 89."
    " Current capability: 80.",
    "store it in layout compressed-tensors or modelopt, which have kernels without FP8 as well",
)
_W8A8 = {"*": Scheme("QuarkW8A8Fp8"), "sm80": Scheme("QuarkW8A8Fp8", _TOO_OLD)}
_NOT_QUARK = {"*": Scheme("QuarkLinearMethod", _NO_QUARK)}
_CT_W8A8 = {"*": Scheme("CompressedTensorsW8A8Fp8")}
_NO_KERNEL = "ValueError: Failed to find a kernel that can implement the {} linear layer."
_NO_MARLIN = Finding(
    "init",
    "ValueError: Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported: Marlin FP4 not"
    " available",
    _USE_CT,
)


def _not_on_rocm(name: str, kind: str) -> dict[str, Scheme]:
    refused = Finding("init", _NO_KERNEL.format(kind), _USE_CT)
    return {"*": Scheme(name), "gfx942": Scheme(name, refused)}


_CT_W8A16 = _not_on_rocm("CompressedTensorsW8A16Fp8", "ScaledMM")
_CT_NVFP4 = {"*": Scheme("CompressedTensorsW4A4Fp4")}
_WNA16 = {"*": Scheme("CompressedTensorsWNA16")}
_CT_MXFP4 = _not_on_rocm("CompressedTensorsW4A4Mxfp4", "MXFP4")
_INT4 = {"*": Scheme("QuarkW4A16Int4")}
_MODELOPT = {"*": Scheme("ModelOptLinearMethod")}
_FP8 = {"*": Scheme("Fp8LinearMethod")}
_AWQ = {"*": Scheme("AutoAWQMarlinLinearMethod")}
_NO_WNA16 = "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
_NO_W4A8 = Finding("init", _NO_WNA16, _USE_CT)
_BYTES_FOR_WORDS = Finding(
    "load",
    "ValueError: There is no module or parameter named 'weight': 4 bits in a byte each are"
    " declared, and words of eight are expected",
    _USE_CT,
)
_GROUPS = ("channel", "group32", "group64", "group128")
_EVERY_GROUP = ("group16", *_GROUPS, "group256")
_BITS = range(2, 9)
_MARLIN = (4, 8)
"""Bits of symmetric codes that Marlin has; others are for humming, on CUDA."""
_GPTQ = {"*": Scheme("AutoGPTQLinearMethod")}
_AUTO_ROUND = {"*": Scheme("INCWNA16LinearScheme")}
_ROCM = ("gfx942", "gfx950")


def _gptq_refused(text: str) -> dict[str, Scheme]:
    return {"*": Scheme("AutoGPTQConfig", Finding("config", f"ValueError: {text}", _USE_CT))}


_ORDERED = _gptq_refused(
    "GPTQ group activation ordering (desc_act=True) is no longer supported. Use a checkpoint with"
    " static activation ordering or desc_act=False."
)
_REORDERED = Finding(
    "init",
    "ValueError: Compressed-tensors group/dynamic activation ordering (actorder='group') is no"
    " longer supported. Use a checkpoint with static/weight activation ordering or without"
    " activation ordering.",
    _USE_CT,
)


def _no_marlin_groups(size: str) -> dict[str, Scheme]:
    text = f"ValueError: Marlin does not support group_size = {size.removeprefix('group')}."
    remedy = "quantize with groups of 32, 64 or 128"
    return {"*": Scheme("AutoGPTQLinearMethod", Finding("init", text, remedy))}


def _no_inc(bits: int, mark: str) -> Scheme:
    text = (
        f"NotImplementedError: INC quantization with bits={bits}, sym={not mark} is not supported."
        " Only 4-bit and 8-bit symmetric quantization is supported with Marlin kernels."
    )
    return Scheme("INCWNA16LinearScheme", Finding("init", text, _USE_CT))


_INT8_WEIGHTS = Finding(
    "config",
    "AssertionError: vllm/model_executor/layers/quantization/compressed_tensors/"
    "compressed_tensors.py:367: 8 bits in a byte each want activations of 8 bits",
    _USE_CT,
)
_GROUPS_ALONE = ("group32", "group64", "group128")

SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    **{
        f"compressed-tensors int{bits}{mark} {size} none": _WNA16
        for bits in _BITS
        for mark in ("", "+")
        for size in _EVERY_GROUP
    },
    **{
        f"compressed-tensors int{bits}{mark} ordered{size} none": {
            "*": Scheme("CompressedTensorsConfig", _REORDERED)
        }
        for bits in _BITS
        for mark in ("", "+")
        for size in ("", 16, 32, 64, 128, 256)
    },
    "compressed-tensors int8@ channel none": {
        "*": Scheme("CompressedTensorsConfig", _INT8_WEIGHTS)
    },
    **{
        f"gptq int{bits}{mark} {size} none": _gptq_refused(
            f"Unsupported quantization config: bits={bits}, sym={not mark}"
        )
        for bits in _BITS
        for mark in ("", "+")
        for size in _EVERY_GROUP
    },
    **{f"gptq int{bits} {size} none": _GPTQ for bits in _MARLIN for size in _GROUPS},
    **{
        f"gptq int{bits} {size} none": _no_marlin_groups(size)
        for bits in _MARLIN
        for size in ("group16", "group256")
    },
    **{
        f"gptq int{bits}{mark} ordered{size} none": _ORDERED
        for bits in _BITS
        for mark in ("", "+")
        for size in (16, 32, 64, 128, 256)
    },
    **{
        f"auto-round int{bits}{mark} {size} none": dict.fromkeys(
            ("*",) if bits in _MARLIN else _ROCM, _no_inc(bits, mark)
        )
        for bits in _BITS
        for mark in ("", "+")
        for size in _EVERY_GROUP
    },
    **{f"auto-round int{bits} {size} none": _AUTO_ROUND for bits in _MARLIN for size in _GROUPS},
    **{
        f"auto-round awq-int4{mark} {size} none": _AUTO_ROUND
        for mark in ("", "+")
        for size in _GROUPS
    },
    **{
        f"compressed-tensors int8@ {size} int8-{how}": {"*": Scheme("CompressedTensorsW8A8Int8")}
        for size in ("channel", "tensor")
        for how in ("token-dynamic", "tensor-static")
    },
    "compressed-tensors int4@ group128 int8-token-dynamic": {
        "*": Scheme("CompressedTensorsW4A8Int", _NO_W4A8)
    },
    "compressed-tensors int4@ group128 token-dynamic": {
        "sm90": Scheme("CompressedTensorsW4A8Fp8", _BYTES_FOR_WORDS),
        "*": Scheme("CompressedTensors", _NO_CT),
    },
    "compressed-tensors mxfp4 mxfp4": _CT_MXFP4,
    "compressed-tensors mxfp8 mxfp8": {"*": Scheme("CompressedTensorsW8A8Mxfp8")},
    "compressed-tensors mxfp8 none": {"*": Scheme("CompressedTensorsW8A8Mxfp8")},
    "compressed-tensors fp8 tensor tensor-dynamic": _CT_W8A8,
    **{
        f"quark {dtype} {size} none": _INT4 for dtype in ("int4", "uint4") for size in _GROUPS_ALONE
    },
    "quark int8 tensor int8-tensor-static": {"*": Scheme("QuarkW8A8Int8")},
    "quark nvfp4 nvfp4": {"*": Scheme("QuarkNVFP4")},
    "modelopt fp8 block none": _MODELOPT,
    "modelopt mxfp8 mxfp8": _MODELOPT,
    **{
        f"awq {dtype} {size} none": _AWQ
        for dtype in ("int4", "int4=")
        for size in ("group16", *_GROUPS_ALONE, "group256")
    },
    "awq int4= channel none": {"*": Scheme("AutoAWQLinearMethod", whole_rows=True)},
    "quark int4 channel none": {"*": Scheme("QuarkW4A16Int4", _NO_GROUP)},
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
    "quark mxfp4 none": {"*": Scheme("QuarkOCP_MX")},
    "quark mxfp4 token-dynamic": {"*": Scheme("QuarkOCP_MX", _NO_ACTIVATIONS)},
    "quark mxfp4 tensor-static": {"*": Scheme("QuarkW4A8_MXFP4_FP8")},
    "quark mxfp4 mxfp4": {"*": Scheme("QuarkOCP_MX")},
    "modelopt fp8 tensor tensor-static": _MODELOPT,
    "modelopt fp8 channel token-dynamic": _MODELOPT,
    "modelopt nvfp4 none": {**_MODELOPT, "gfx942": Scheme("ModelOptLinearMethod", _NO_MARLIN)},
    "modelopt nvfp4 nvfp4": _MODELOPT,
    "compressed-tensors int4 channel token-dynamic": {"*": Scheme("CompressedTensors", _NO_CT)},
    "compressed-tensors int4 group128 token-dynamic": {
        "sm90": Scheme("CompressedTensorsW4A8Fp8"),
        "*": Scheme("CompressedTensors", _NO_CT),
    },
    "compressed-tensors fp8 channel none": _CT_W8A16,
    "compressed-tensors fp8 channel token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 channel tensor-static": _CT_W8A8,
    "compressed-tensors fp8 tensor none": _CT_W8A16,
    "compressed-tensors fp8 tensor token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 tensor tensor-static": _CT_W8A8,
    "compressed-tensors fp8 block group-dynamic": _CT_W8A8,
    "compressed-tensors nvfp4 none": {
        **_CT_NVFP4,
        "gfx942": Scheme("CompressedTensorsW4A4Fp4", _NO_MARLIN),
    },
    "compressed-tensors nvfp4 nvfp4": _CT_NVFP4,
    "compressed-tensors mxfp4 none": _CT_MXFP4,
    "fp8 fp8 tensor token-dynamic": _FP8,
    "fp8 fp8 tensor tensor-static": _FP8,
    "fp8 fp8 block group-dynamic": _FP8,
    "awq int4 channel none": {"*": Scheme("AutoAWQMarlinLinearMethod", whole_rows=True)},
}
