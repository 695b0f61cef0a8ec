"""What SGLang 0.5.23 takes a declaration for, or why it refuses it, before it looks at any layer.

Source: `_parse_quant_hf_config` and `_verify_quantization` of `configs/model_config.py`,
`_get_quantization_config` of `model_loader/loader.py`, and `get_min_capability` of each config.
"""

from dataclasses import replace

from ...drafts.engine_traits import Finding
from ..declaration import Declaration
from ..declared.quark import quantizes_outputs
from ..needed_keys import NEEDED, NO_OUTPUTS, Needed, absent_key

_NAMES = """
    fp8 mxfp8 minimax_m3_nvfp4 blockwise_int8 modelopt modelopt_fp8 modelopt_fp4 nvfp4_online
    modelopt_mixed w8a8_int8 w8a8_fp8 awq awq_marlin bitsandbytes gguf gptq gptq_marlin
    moe_wna16 compressed-tensors w4afp8 petit_nvfp4 quark quark_mxfp4 auto-round auto-round-int8
    modelslim quark_int4fp8_moe humming mxfp_w4a8 mxfp4
"""
METHODS = frozenset(_NAMES.split())
_ROCM_NAMES = """
    awq fp8 compressed-tensors w8a8_fp8 petit_nvfp4 quark mxfp4 mxfp8 auto-round auto-round-int8
    quark_int4fp8_moe quark_mxfp4
"""
_ON_ROCM = {*_ROCM_NAMES.split(), "modelopt", "gptq"}
"""The last two are looked at further."""
_CAPABILITIES = {"sm80": 80, "sm90": 90, "sm100": 100, "gfx942": 94, "gfx950": 95}
_MINIMUM = {"w8a8_fp8": 89, "w4afp8": 90}
"""quant_method -> the compute capability that it wants; of others it is 80 or less."""
_ALGORITHMS = ("FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
_MARLIN = ("awq_marlin", "gptq_marlin")
_ROCM = "ValueError: {} quantization is currently not supported in ROCm."
_TOO_OLD = (
    "ValueError: The quantization method {} is not supported for the current GPU. Minimum"
    " capability: {}. Current capability: {}."
)
_ONLY_REGULAR = (
    "ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found {!r}. Use the"
    " native 'mxfp8' quantization method for MXFP8 or ModelOptFp4Config for FP4."
)
_ONLY_FP4 = (
    "ValueError: ModelOpt currently only supports: FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4 quantizations"
    " in sglang. Please check the quantization config for your model's configuration."
)
_NO_SECTION = "ValueError: Cannot find any of ['quantization'] in the model's quantization config."
_STORE = "store it in layout compressed-tensors or quark: draftquant transcode"
_DEQUANTIZE = "write it in BF16 with the tool that made it, and quantize that"
_NEEDED: Needed = {
    **NEEDED,
    "auto-round": (*NEEDED["auto-round"], ("sym",)),
    "mxfp8": NEEDED["fp8"],
    "blockwise_int8": NEEDED["fp8"],
}
_AUTO_ROUND_BITS = (2, 3, 4, 8)
_PACKAGES = {"bitsandbytes": "bitsandbytes>=0.46.1"}
"""quant_method -> the package that it wants, and that its wheel does not ask for."""
_LAZY = (
    "RuntimeError: Can't access the shape of an uninitialized parameter or buffer: a draft of GGUF"
    " is one file"
)


def taken(declaration: Declaration, arch: str) -> Declaration | Finding | None:
    """`_parse_modelopt_quant_config`: algorithms by name, whatever the form.

    What it finds replaces the nested form in config.json, whose excludes are then not read.
    """
    if arch.startswith("gfx") and declaration.spelled in _MARLIN:
        text = _ROCM.format(declaration.spelled)
        return Finding("config", text, "write quant_method awq or fp8")
    algorithm = declaration.algorithm or ""
    known = algorithm in ("FP8", "MXFP8", "MIXED_PRECISION") or "FP4" in algorithm
    if declaration.form == "side file" and not known:
        return None
    if declaration.method is None and known:
        declaration = replace(declaration, method="modelopt")
    if declaration.method == "modelopt" and (problem := _algorithm_problem(algorithm, arch)):
        return problem
    problem = _refused(declaration, arch) or absent_key(declaration, _NEEDED)
    if problem is not None:
        return problem
    if declaration.form != "nested" or not declaration.groups:
        return declaration
    return replace(
        declaration,
        excludes=(),
        exclude_remedy="write quantization_config in ModelOpt's flat form: SGLang reads no excludes"
        " of the nested one",
    )


def _algorithm_problem(algorithm: str, arch: str) -> Finding | None:
    """Why SGLang refuses an algorithm of ModelOpt by its name."""
    rocm, capability = arch.startswith("gfx"), _CAPABILITIES.get(arch, 100)
    if algorithm == "MXFP8":
        text = _TOO_OLD.format("mxfp8", 100, capability)
        return Finding("config", text, _STORE) if capability < 94 else None
    if algorithm == "MIXED_PRECISION" and rocm:
        return Finding("config", _ROCM.format("modelopt_mixed"), _STORE)
    if algorithm in ("FP8", "MIXED_PRECISION") and capability < 89:
        name = "modelopt_fp8" if algorithm == "FP8" else "modelopt_mixed"
        return Finding("config", _TOO_OLD.format(name, 89, capability), _STORE)
    if algorithm in _ALGORITHMS:
        return None  # on ROCm the row of the scheme says it
    if "FP4" in algorithm:
        text = _ROCM.format("modelopt_fp4") if rocm else _ONLY_FP4
    else:
        text = _NO_SECTION if rocm else _ONLY_REGULAR.format(algorithm)
    return Finding("config", text, _STORE)


def _refused(declaration: Declaration, arch: str) -> Finding | None:
    """A quant_method by its name, and what of AutoRound's keys it has not."""
    method, capability = declaration.method or "", _CAPABILITIES.get(arch, 100)
    if method in METHODS and method not in _ON_ROCM and arch.startswith("gfx"):
        return Finding("config", _ROCM.format(method), _DEQUANTIZE)
    if capability < _MINIMUM.get(method, 0):
        text = _TOO_OLD.format(method, _MINIMUM[method], capability)
        return Finding("config", text, _DEQUANTIZE)
    if method in _PACKAGES:
        text = f"ImportError: Please install {_PACKAGES[method]}"
        return Finding("init", text, f"{_DEQUANTIZE}; or install it beside SGLang, and try")
    if method == "gguf":
        return Finding("init", _LAZY, _DEQUANTIZE)
    if method == "quark" and quantizes_outputs(declaration.keys):
        return Finding("init", NO_OUTPUTS, _DEQUANTIZE)
    keys = declaration.keys
    bits, kind = keys.get("bits"), keys.get("data_type", "int")
    if method == "auto-round" and bits not in (*_AUTO_ROUND_BITS, None):
        text = f"ValueError: Unsupported weight_bits: {bits}, currently only support"
        return Finding("config", f"{text} {set(_AUTO_ROUND_BITS)}", _DEQUANTIZE)
    if method == "auto-round" and kind != "int":
        text = f"ValueError: Unsupported data_type: {kind}, currently only support {{'int'}}"
        return Finding("config", text, _DEQUANTIZE)
    return None
