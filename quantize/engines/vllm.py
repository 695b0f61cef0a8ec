"""What vLLM 0.33.0 does with a draft.

Sources: loading executed with its own classes on faked sm90 and sm100 (`tests/engines/RESULTS.md`),
whose error texts these are; rules read in `vllm/model_executor/layers/quantization` of 0.33.0.
"""

import re
from dataclasses import replace

from .blocks import BLOCK, block_problem
from .contract import (
    UNKNOWN_FIRST_LAYER,
    Engine,
    Finding,
    Module,
    Question,
    UnsureError,
    layer_modules,
)
from .declaration import Declaration
from .excludes import exact_or_regex, substring_or_wildcard
from .vllm_schemes import SCHEMES

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
_INVALID = "ValidationError: 1 validation error for SpeculativeConfig Value error, {}"
_UNSUPPORTED = _INVALID.format("Model architectures ['{}'] are not supported for now.")
_NESTED_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")


def taken(declaration: Declaration) -> Declaration | Finding:
    """`_normalize_quantization_config`: ModelOpt's nested form needs no quant_method."""
    if declaration.form == "flat" or not declaration.by_modelopt:
        return declaration
    algorithm = declaration.algorithm or ""
    if algorithm.upper() not in _NESTED_ALGORITHMS:
        return Finding(
            "config",
            _INVALID.format(f"Unknown ModelOpt quant algo: {algorithm}"),
            "write quantization_config of config.json in ModelOpt's flat form",
        )
    return replace(declaration, method="modelopt")


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
                    " after the target's, whose number is not known here (--target-layers)"
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
    if scheme.granularity == "block":
        return _block_problem(question, module, shapes)
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


def _block_problem(
    question: Question, module: Module, shapes: list[tuple[int, int]]
) -> Finding | None:
    """Fused linears of layout fp8 are let through, and then have too few rows of scales."""
    parts = [rows for rows, _ in shapes]
    if question.method != "fp8" or len(parts) < 2 or not any(rows % BLOCK for rows in parts):
        return block_problem(question, module, shapes)
    if not any(rows % BLOCK for rows in parts[:-1]):
        return None
    start, size = (-(-count // BLOCK) for count in (sum(parts[:-1]), sum(parts)))
    return Finding(
        "load",
        f"RuntimeError: start ({start}) + length (1) exceeds dimension size ({size}).",
        f"quantize {module.leaf} per channel: its parts are no whole blocks of {BLOCK} rows",
    )


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
    unknown_method=_INVALID.format("Unknown quantization method: {}."),
    no_method=None,
    taken=taken,
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
