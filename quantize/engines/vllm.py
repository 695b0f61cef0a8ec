"""What vLLM 0.33.0 does with a draft.

Sources: loading executed with its own classes on faked sm90 and sm100 (`tests/engines/RESULTS.md`),
whose error texts these are; rules read in `vllm/model_executor/layers/quantization` of 0.33.0.
"""

import re
from collections.abc import Mapping

from .contract import Engine, Finding, Module, Question, Scheme, UnsureError, layer_modules
from .excludes import exact_or_regex, substring_or_wildcard

_USE_QUARK = "use quark int4 in groups of 128, or FP8 per channel with dynamic tokens"
_USE_CT = "use int4 without activations, or FP8 per channel with dynamic tokens"
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
    "quantize without activations, or with MXFP4 activations",
)
_NO_CT = Finding(
    "init", "NotImplementedError: No compressed-tensors compatible scheme was found", _USE_CT
)
_W8A8 = {"*": Scheme("QuarkW8A8Fp8")}
_NOT_QUARK = {"*": Scheme("QuarkLinearMethod", _NO_QUARK)}
_CT_W8A8 = {"*": Scheme("CompressedTensorsW8A8Fp8")}
_CT_W8A16 = {"*": Scheme("CompressedTensorsW8A16Fp8")}
_CT_NVFP4 = {"*": Scheme("CompressedTensorsW4A4Fp4")}
_WNA16 = {"*": Scheme("CompressedTensorsWNA16")}
_INT4 = {"*": Scheme("QuarkW4A16Int4")}
_MODELOPT = {"*": Scheme("ModelOptLinearMethod")}
_FP8 = {"*": Scheme("Fp8LinearMethod")}
_AWQ = {"*": Scheme("AutoAWQMarlinLinearMethod")}

SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    "quark int4 channel none": {"*": Scheme("QuarkW4A16Int4", _NO_GROUP)},
    "quark int4 channel token-dynamic": _NOT_QUARK,
    "quark int4 channel tensor-static": _NOT_QUARK,
    "quark int4 group32 none": _INT4,
    "quark int4 group128 none": _INT4,
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
    "modelopt nvfp4 none": _MODELOPT,
    "modelopt nvfp4 nvfp4": _MODELOPT,
    "compressed-tensors int4 channel none": _WNA16,
    "compressed-tensors int4 group128 none": _WNA16,
    "compressed-tensors int4 channel token-dynamic": {"*": Scheme("CompressedTensors", _NO_CT)},
    "compressed-tensors int4 group128 token-dynamic": {
        "sm90": Scheme("CompressedTensorsW4A8Fp8"),
        "sm100": Scheme("CompressedTensors", _NO_CT),
    },
    "compressed-tensors fp8 channel none": _CT_W8A16,
    "compressed-tensors fp8 channel token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 channel tensor-static": _CT_W8A8,
    "compressed-tensors fp8 tensor none": _CT_W8A16,
    "compressed-tensors fp8 tensor token-dynamic": _CT_W8A8,
    "compressed-tensors fp8 tensor tensor-static": _CT_W8A8,
    "compressed-tensors nvfp4 none": _CT_NVFP4,
    "compressed-tensors nvfp4 nvfp4": _CT_NVFP4,
    "compressed-tensors mxfp4 none": {"*": Scheme("CompressedTensorsW4A4Mxfp4")},
    "fp8 fp8 tensor token-dynamic": _FP8,
    "fp8 fp8 tensor tensor-static": _FP8,
    "fp8 fp8 block group-dynamic": _FP8,
    "awq int4 group128 none": _AWQ,
    "awq int4 channel none": _AWQ,
}
_METHODS = frozenset(
    [
        "awq",
        "auto_awq",
        "fp8",
        "fbgemm_fp8",
        "fp_quant",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "auto_gptq",
        "gptq",
        "gptq_marlin",
        "awq_marlin",
        "humming",
        "compressed-tensors",
        "experts_int8",
        "quark",
        "moe_wna16",
        "torchao",
        "inc",
        "mxfp4",
        "gpt_oss_mxfp4",
        "deepseek_v4_fp8",
        "online",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "mxfp8",
    ]
)
_UNSUPPORTED = (
    "ValidationError: 1 validation error for SpeculativeConfig Value error, Model architectures"
    " ['{}'] are not supported for now."
)
_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")
UNKNOWN_FIRST_LAYER = 10**6


def modules(question: Question) -> tuple[Module, ...]:
    """Parameters count the draft's layers from 0, excludes are held against target's + own."""
    first = question.first_layer or UNKNOWN_FIRST_LAYER
    layers = [
        Module(f"model.layers.{i}.{path}", f"model.layers.{first + i}.{path}", parts, sharding)
        for i in range(question.num_layers)
        for path, parts, sharding in layer_modules(question.family, f"layers.{i}")
    ]
    return (
        *layers,
        Module("model.fc", "model.fc", ("fc",), "replicated"),
        Module("lm_head", "lm_head", ("lm_head",), "column"),
    )


def plain(question: Question) -> frozenset[str]:
    """Only ModelOpt quantizes a head, and only the Llama draft hands it its config."""
    head_too = question.method == "modelopt"
    return frozenset() if head_too and question.family == "eagle3-llama" else frozenset({"lm_head"})


def is_excluded(question: Question, module: Module, patterns: tuple[str, ...]) -> bool:
    """No list of fused parts reaches the draft: q_proj says nothing about qkv_proj.

    Raises:
        UnsureError: a pattern names a layer by a number that depends on the target.
    """
    method = question.method
    if method == "modelopt" and question.family == "dflash":
        patterns = _mapped(question, patterns)
    elif question.first_layer is None:
        _check_numbers(question, patterns)
    if method == "awq":
        if question.declaration and not question.declaration.lists_excludes:
            patterns = _unpacked(question)
        return any(pattern in module.prefix for pattern in patterns)
    if method == "modelopt":
        return any(substring_or_wildcard(pattern, module.prefix) for pattern in patterns)
    if method == "fp8":
        return module.prefix in patterns
    return any(exact_or_regex(pattern, module.prefix) for pattern in patterns)


def _mapped(question: Question, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """`map_draft_quant_config`: for DFlash in ModelOpt's layout, names on disk become runtime's."""
    first = question.first_layer or UNKNOWN_FIRST_LAYER
    mapped = []
    for pattern in patterns:
        tree = len(pattern) >= 2 and pattern.endswith("*") and not pattern.endswith(".*")
        for name in (pattern[:-1], f"{pattern[:-1]}.*") if tree else (pattern,):
            own = re.sub(
                r"^((?:model\.)?\*?)layers\.(\d+)(?=\.|\*|$)",
                lambda match: f"{match[1]}layers.{int(match[2]) + first}",
                name,
            )
            rooted = own.startswith("*") or re.match(r"model(?:\.|\*|$)", own)
            mapped.append(own if rooted else f"model.{own}")
    return tuple(mapped)


def _check_numbers(question: Question, patterns: tuple[str, ...]) -> None:
    """A number below the draft's own layers cannot be one of the runtime's."""
    for pattern in patterns:
        for number in _NUMBER.findall(pattern):
            if int(number) >= question.num_layers:
                raise UnsureError(
                    f"the exclude {pattern!r} names layer {number}: vLLM counts the draft's layers"
                    " after the target's, whose number is not known here"
                )


def _unpacked(question: Question) -> tuple[str, ...]:
    """AWQ without a list: what has a plain weight is not quantized."""
    names = question.tensor_names
    return tuple(
        name.removesuffix(".weight")
        for name in names
        if name.endswith(".weight") and f"{name.removesuffix('.weight')}.qweight" not in names
    )


def config_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig` and of the Llama draft's loader."""
    if question.family == "eagle3-mla" and question.config.get("model_type") == "deepseek_v3":
        return Finding(
            "config",
            _UNSUPPORTED.format("Eagle3DeepSeekMTPModel"),
            "set model_type to kimi_k2: deepseek_v3 is rewritten to the MTP model",
        )
    if question.family != "dflash" and question.config.get("draft_vocab_size") is None:
        if "d2t" in question.tensor_names:
            return Finding(
                "load",
                "ValueError: There is no module or parameter named 'draft_id_to_target_id' in"
                " Eagle3LlamaForCausalLM.",
                "add draft_vocab_size to config.json",
            )
        return Finding("unknown", "draft_vocab_size is missing", "add it to config.json")
    return None


def module_problem(
    question: Question, module: Module, shapes: list[tuple[int, int]]
) -> Finding | None:
    """What the kernels of one quantized module, `shapes` per shard, ask of its shape."""
    scheme, (rows, columns) = question.scheme, (sum(r for r, _ in shapes), shapes[0][1])
    w4a8 = question.signature == "compressed-tensors int4 group128 token-dynamic"
    if w4a8 and question.arch == "sm90" and (rows % 128 or columns % 128):
        return Finding(
            "init",
            "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
            " Reasons: CutlassW4A8LinearKernel cannot implement due to: K and N must be"
            f" divisible by 128, got {(columns, rows)}",
            f"keep {module.leaf} in BF16, or quantize to FP8",
        )
    if scheme.granularity == "block" and any(r % 128 for r, _ in shapes[:-1]):
        start, size = (-(-count // 128) for count in (rows - shapes[-1][0], rows))
        return Finding(
            "load",
            f"RuntimeError: start ({start}) + length (1) exceeds dimension size ({size}).",
            f"quantize {module.leaf} per channel: its parts are no whole blocks of 128 rows",
        )
    if scheme.granularity == "group" and columns % (scheme.group_size or 1):
        if question.method != "compressed-tensors" or scheme.weight_dtype != "int4":
            return Finding("unknown", f"{module.name}: groups are split by shards", "use fewer")
        text = (
            f"ValueError: Weight input_size_per_partition={columns} for layer '{module.prefix}' is"
            f" not divisible by group_size={scheme.group_size}."
            if question.arch == "sm90"
            else "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
        )
        return Finding("init", text, "use fewer tensor-parallel shards, or smaller groups")
    return None


def launch(question: Question, num_draft_tokens: int) -> str:
    """The server's command line."""
    method = "dflash" if question.family == "dflash" else "eagle3"
    return (
        f"vllm serve TARGET --tensor-parallel-size {question.tp} --speculative-config"
        f' \'{{"method": "{method}", "model": "{{draft}}",'
        f' "num_speculative_tokens": {num_draft_tokens}}}\''
    )


_FAMILIES = frozenset({"eagle3-llama", "eagle3-mla", "dflash"})
ENGINE = Engine(
    name="vllm",
    version="0.33.0",
    evidence="loading executed on a CPU with vLLM 0.33.0's own classes; no kernel was run",
    archs=("sm90", "sm100"),
    architectures={
        "LlamaForCausalLMEagle3": "eagle3-llama",
        "Eagle3DeepseekV2ForCausalLM": "eagle3-mla",
        "DFlashDraftModel": "dflash",
    },
    refused_architectures={
        "EAGLE3LlamaForCausalLM": Finding(
            "config",
            _UNSUPPORTED.format("EAGLE3LlamaForCausalLM"),
            "set architectures to LlamaForCausalLMEagle3",
        )
    },
    methods=_METHODS,
    unknown_method="ValidationError: 1 validation error for SpeculativeConfig Value error, Unknown"
    " quantization method: {}.",
    no_method=None,
    schemes=SCHEMES,
    modules=modules,
    plain=plain,
    is_excluded=is_excluded,
    config_problem=config_problem,
    module_problem=module_problem,
    refuses_unknown=_FAMILIES,
    casts=_FAMILIES,
    launch=launch,
)
