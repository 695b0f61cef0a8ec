"""What vLLM 0.33.0 takes a declaration for, or why it refuses it, before it looks at any layer.

Source: `_verify_quantization` and `_normalize_quantization_config` of `config/model.py`,
`QUANTIZATION_METHODS`, and `supported_quantization` of `platforms/rocm.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...drafts.engine_traits import INVALID, Finding
from ..declaration import Declaration
from ..declared.quark import quantizes_outputs
from ..linear_scheme import Group
from ..needed_keys import NEEDED, NO_OUTPUTS, absent_key

_NAMES = """
    awq auto_awq fp8 fbgemm_fp8 fp_quant modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed
    auto-round auto_gptq gptq gptq_marlin awq_marlin humming compressed-tensors experts_int8 quark
    moe_wna16 torchao inc mxfp4 gpt_oss_mxfp4 deepseek_v4_fp8 online fp8_per_tensor fp8_per_block
    fp8_per_channel int8_per_channel_weight_only nvfp4_per_token mxfp8
"""
METHODS = frozenset(_NAMES.split())
UNKNOWN_METHOD = INVALID.format("Unknown quantization method: {}.")
_NESTED_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MXFP8",
    "MIXED_PRECISION",
)
_DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})
_NOT_ON_ROCM = frozenset(
    ["experts_int8", "humming", "moe_wna16", "nvfp4_per_token", "int8_per_channel_weight_only"]
)
_OF_PACKAGES = {"torchao": "torchao>=0.10.0"}
"""quant_method -> the package that it wants, and that its wheel does not ask for."""
_FLOATS = frozenset({"experts_int8"})
"""Each quant_method that quantizes experts alone, while loading."""
_OF_MXFP8 = "modelopt_mxfp8"
"""The quant_method that says the algorithm."""
_NULL = "AttributeError: 'NoneType' object has no attribute 'lower'"
_REMOVE = "remove quantization_config, or hf_quant_config.json, if the draft is not quantized"
_DEQUANTIZE = "write it in BF16 with the tool that made it, and quantize that"


def taken(declaration: Declaration, arch: str) -> Declaration | Finding:
    """`_normalize_quantization_config`: ModelOpt's nested form needs no quant_method."""
    keys, method = declaration.keys, declaration.method
    if None in (keys.get("quant_method", ""), keys.get("quantization", "")):
        return Finding("config", _NULL, _REMOVE)
    if not method and declaration.algorithm is None:
        return replace(declaration, method=None)
    if method == "modelopt" and not declaration.algorithm and declaration.spelled != _OF_MXFP8:
        text = "ValueError: Missing 'quant_algo' in quantization config"
        return Finding("init", text, _REMOVE)
    problem = _refused(declaration, arch) or absent_key(declaration, NEEDED)
    if problem is not None:
        return problem
    if declaration.algorithm == "NVFP4" and _is_weight_only(keys.get("config_groups")):
        declaration = replace(declaration, groups=tuple(map(_without_inputs, declaration.groups)))
    if declaration.form == "flat" or not declaration.by_modelopt:
        algorithm = (declaration.algorithm or "").upper()
        if declaration.method == "modelopt" and algorithm and algorithm not in _ALGORITHMS:
            text = f"ValueError: ModelOpt currently only supports: {list(_ALGORITHMS)}"
            remedy = "store it in layout compressed-tensors or quark: draftquant transcode"
            return Finding("init", text, remedy)
        return declaration
    algorithm = declaration.algorithm or ""
    if algorithm.upper() not in _NESTED_ALGORITHMS:
        return Finding(
            "config",
            INVALID.format(f"Unknown ModelOpt quant algo: {algorithm}"),
            "write quantization_config of config.json in ModelOpt's flat form",
        )
    return replace(declaration, method="modelopt")


def _is_weight_only(groups: object) -> bool:
    """`ModelOptNvFp4Config._from_config`: no group has input_activations, or each has null."""
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    inputs = [each.get("input_activations") for each in found if isinstance(each, Mapping)]
    return bool(found) and inputs == [None] * len(found)


def _without_inputs(group: Group) -> Group:
    not_read = (*group.scheme.not_read, "input_scale")
    return group._replace(scheme=replace(group.scheme, not_read=not_read))


def _refused(declaration: Declaration, arch: str) -> Finding | None:
    """A quant_method by its name."""
    method = declaration.method or ""
    if method in _DEPRECATED:
        text = f"The quantization method {method} is deprecated and will be removed in future"
        return Finding("config", INVALID.format(text), _DEQUANTIZE)
    if method in _NOT_ON_ROCM and arch.startswith("gfx"):
        text = f"{method} quantization is currently not supported in rocm."
        return Finding("config", INVALID.format(text), _DEQUANTIZE)
    if method in _OF_PACKAGES:
        text = f"ImportError: Please install {_OF_PACKAGES[method]}"
        return Finding("config", text, f"{_DEQUANTIZE}; or install it beside vLLM, and try")
    if method in _FLOATS:
        text = "ValueError: There is no module or parameter named 'weight_scale'"
        return Finding("load", text, _DEQUANTIZE)
    if method == "compressed-tensors":
        return _transforms(declaration)
    if method == "quark" and quantizes_outputs(declaration.keys):
        return Finding("init", NO_OUTPUTS, _DEQUANTIZE)
    return None


def _transforms(declaration: Declaration) -> Finding | None:
    """Sparsity by targets was taken out; transforms are read, see `modules.config_problem`."""
    sparsity = declaration.keys.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("targets"):
        text = (
            "DeprecationWarning: Sparsity support has been removed from compressed-tensors. Please"
            " use a model without sparsity configuration."
        )
        return Finding("config", text, _DEQUANTIZE)
    return None
