"""What vLLM does with a draft: loading executed with 0.33.0's own classes on faked GPUs.

Error texts are its own (`tests/engines/RESULTS.md`); rules were read in
`vllm/model_executor/layers/quantization`.
"""

import re
from collections.abc import Mapping
from functools import partial
from operator import eq

from ..drafts.engine_traits import QKV, Finding
from ..files.safetensors_header import TensorInfo
from . import mtp_linears as mtp
from .built_linears import block_problem, cut_groups, group_problem
from .contract import UNKNOWN_FIRST_LAYER, Module, Question, UnsureError
from .engine import ExcludeRule
from .excludes import (
    SOME_PARTS,
    Matching,
    Patterns,
    auto_round_in_vllm,
    exact_or_regex,
    extra_heads,
    gptq_by_lists,
    is_transformed,
    substring,
    substring_or_wildcard,
    whole_or_parts,
)
from .linear_scheme import BLOCK, LinearScheme
from .mtp_linears import layer_linears

# ---- Which integers and blocks vLLM 0.33.0 has a kernel for, by bits, groups and a shard's shape
# Source: `choose_mp_linear_kernel` of `kernels/linear/__init__.py` and each kernel's
# `can_implement`;
# executed (`tests/engines/foreign_mix.py`). On CUDA the last kernel, of the package humming-
# kernels
# that vLLM's wheel asks for, takes all bits and groups. On ROCm there is Triton's, and one for
# float16 alone, in which a draft is served where its target is.

_TRITON_GROUPS = (32, 64, 128, 256)
_NO_KERNEL = "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
_NO_WHOLE_GROUPS = (
    "ValueError: Weight input_size_per_partition={columns} for layer '{prefix}' is not divisible by"
    " group_size={group_size}."
)
_WHOLE_GROUPS = "compressed-tensors "  # begins signatures that ask for whole groups in each shard
_OF_AWQ = "awq "
_CHOSEN = {
    f"{layout} int{bits}{mark}"
    for layout in ("compressed-tensors", "gptq", "auto-round")
    for bits in range(2, 9)
    for mark in ("", "+")
}
"""Begins signatures, before groups and activations, whose kernel is chosen so."""


def integer_problem(
    question: Question, module: Module, scheme: LinearScheme, rows: int, columns: int
) -> Finding | None:
    """Why no kernel takes a linear of `rows` and `columns` per shard."""
    kind, _, rest = scheme.signature.rpartition(" ")[0].rpartition(" ")
    if kind not in _CHOSEN or not scheme.signature.endswith(" none") or not rest:
        return None
    size, remedy = scheme.group_size or columns, f"keep {module.leaf} in BF16"
    uneven = columns % size != 0
    if uneven and scheme.signature.startswith(_WHOLE_GROUPS):
        said = {"columns": columns, "prefix": module.prefix, "group_size": size}
        return Finding(
            "init",
            _NO_WHOLE_GROUPS.format(**said),
            "serve the draft on fewer GPUs (--tp), or quantize in smaller groups",
        )
    if not question.arch.startswith("gfx"):
        return None
    whole = columns * (question.tp if module.sharding == "row" else 1)
    group = scheme.group_size in (None, whole, *_TRITON_GROUPS)
    four = kind.removesuffix("+").endswith("4")
    if four and group and not uneven and rows % 8 == 0:
        return None
    return Finding("init", _NO_KERNEL, f"{remedy}, or quantize to FP8: recipe fp8-ptpc")


def awq_problem(question: Question, module: Module, scheme: LinearScheme) -> Finding | None:
    """MLA takes kv_b_proj apart, on ROCm by a kernel for some groups: `awq_triton.py:308`."""
    size = scheme.group_size
    latent = module.leaf == "kv_b_proj" and scheme.signature.startswith(_OF_AWQ)
    if not latent or not question.arch.startswith("gfx") or size in (None, 32, 64, 128):
        return None
    text = (
        "AssertionError: vllm/model_executor/layers/quantization/awq_triton.py:308: assert"
        " group_size in AWQ_TRITON_SUPPORTED_GROUP_SIZES or group_size == K"
    )
    return Finding("after load", text, "quantize with groups of 128")


def powers_problem(module: Module, scheme: LinearScheme, columns: int) -> Finding | None:
    """MXFP8 has a scale for each 32 inputs, of which there are whole ones."""
    if scheme.weight_dtype != "mxfp8" or columns % 32 == 0:
        return None
    text = f"ValueError: MXFP8 requires input size divisible by 32, got {columns}"
    return Finding("init", text, f"keep {module.leaf} in BF16, or serve it on fewer GPUs (--tp)")


def marlin_block_problem(
    question: Question, module: Module, scheme: LinearScheme
) -> Finding | None:
    """FP8 in other blocks than 128 x 128 is for Marlin, unasked, but on Hopper for humming.

    On Ampere compressed-tensors' weights are humming's.
    """
    alone = question.arch == "sm80" and scheme.signature.startswith(_WHOLE_GROUPS)
    if scheme.block == BLOCK or alone or question.arch not in ("sm80", "sm100"):
        return None
    text = (
        "AssertionError: vllm/model_executor/layers/quantization/utils/marlin_utils_fp8.py:124:"
        " assert layer.weight.shape == (part_size_k, part_size_n)"
    )
    return Finding("after load", text, f"quantize {module.leaf} in blocks of 128 x 128")


# ---- Which drafts hand vLLM 0.33.0 a head that may be quantized, and what becomes of it
# Sources: loading executed (`tests/engines/RESULTS.md`); `llama_eagle3.py:332`,
# `qwen3_eagle3.py:308`
# and `qwen3_dflash.py:755` give ParallelLMHead a config, `deepseek_eagle3.py:225` gives it none.

OWN_HEAD = "has_own_lm_head"
"""The key of config.json by which DFlash hands its head the declaration: `qwen3_dflash.py:760`."""
_METHODS = frozenset({"modelopt", "compressed-tensors"})
"""Each quant_method that has a way for heads: `compressed_tensors.py:186`, `modelopt.py:254`."""


def plain(question: Question) -> frozenset[str]:
    """The head, where the class hands it no config or the method knows no heads."""
    heads = {"lm_head", *extra_heads(question)}
    if question.method in _METHODS:
        declared, asked = question.traits.vllm.head_declared, question.config.get(OWN_HEAD)
        handed = declared == "always" or (declared == "asked" and asked)
        heads = set() if handed else {"lm_head"}
    others = {each.leaf for each in question.traits.extra_linears if not each.is_head}
    return frozenset({*others, *heads})


def plain_remedy(question: Question, leaf: str) -> str | None:
    """The key that hands a block draft's head the declaration."""
    if leaf == "lm_head" and question.traits.drafts_blocks:
        return f"write {OWN_HEAD}: true into config.json"
    return None


def head_problem(question: Question, module: Module, scheme: LinearScheme) -> Finding | None:
    """`_should_share` compares `weight` with the target's, and packed integers have none.

    Source: `v1/worker/gpu/spec_decode/eagle/utils.py:31`, of the V2 model runner, the default one;
    that of V1 looks whether there is a weight (`llm_base_proposer.py:1527`). A language model's
    head is never shared (`standalone_ar/speculator.py`).
    """
    packed = scheme.suffix == "weight_packed" and scheme.weight_dtype.startswith("int")
    own = question.config.get(OWN_HEAD) or question.traits.whole_model
    if module.leaf != "lm_head" or not packed or own:
        return None
    return Finding(
        "after load",
        "AttributeError: 'ParallelLMHead' object has no attribute 'weight'",
        "quantize the head to FP8, or serve with the V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0)",
    )


_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")
_PARTS_OF_BLOCKS = frozenset({"fp8"})
"""Each quant_method whose fused linears are built although their parts are no whole blocks."""
_PADDED_BLOCKS = frozenset({"modelopt fp8 block none"})
"""Signatures whose rows are padded to whole blocks."""
_BY_QUARK_ITSELF = "quark mxfp4 "
"""Begins signatures whose step after loading may want Quark, or what a linear has not."""
_TILES_OF_128 = frozenset({("compressed-tensors int4 group128 token-dynamic", "sm90")})
"""(signature, GPU) whose only kernel takes weights that are whole tiles."""
_SOME_SHARDS = (
    "Found different quantization schemes for the shards of {}. vLLM requires all to use the same"
    " scheme."
)


def modules(question: Question) -> tuple[Module, ...]:
    """Parameters count the draft's layers from 0, excludes are held against target's + own.

    A language model counts its own alone, below the name that it is built under
    (`v1/worker/gpu/spec_decode/standalone_ar/speculator.py:129`).
    """
    if question.own.mtp is not None:
        return mtp.modules(question, question.own.mtp, lambda fused: fused.vllm)
    whole = question.traits.whole_model
    first = 0 if whole else question.first_layer or UNKNOWN_FIRST_LAYER
    root = "draft_model." if whole else ""
    layers = [
        Module(
            f"model.layers.{i}.{path}",
            f"{root}model.layers.{first + i}.{_excluded_as(question, path)}",
            parts,
            sharding,
        )
        for i in range(question.num_layers)
        for path, parts, sharding in layer_linears(
            question.traits, f"layers.{i}", lambda fused: fused.vllm
        )
    ]
    extra = [
        Module(
            f"model.{each.name}",
            f"model.{each.name}" if each.is_head else each.name,
            (each.name,),
            "replicated",
        )
        for each in question.traits.extra_linears
    ]
    head = Module("lm_head", f"{root}lm_head", ("lm_head",), "column")
    return (
        *layers,
        *([Module("model.fc", "model.fc", ("fc",), "replicated")] if question.fuses else []),
        *extra,
        *([head] if question.has_head else []),
    )


def _excluded_as(question: Question, path: str) -> str:
    """`qwen3_eagle3.py` builds qkv_proj again, and forgets that it is part of self_attn."""
    forgets = question.traits.vllm.forgets_attention and question.normed_heads
    return QKV.vllm if forgets and path.endswith(QKV.vllm) else path


# Without a list of fused parts q_proj says nothing about qkv_proj: `Question.names_of_parts`.


def _excluded(
    matched: Matching, error: str, question: Question, module: Module, patterns: Patterns
) -> bool | Finding:
    _check_numbers(question, patterns)
    parts = question.names_of_parts(module)
    return whole_or_parts(matched, patterns, module, parts, error)


_exact = partial(_excluded, eq, SOME_PARTS)
_exact_or_regex = partial(_excluded, exact_or_regex, _SOME_SHARDS)


def _substring(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    if question.declaration and not question.declaration.keys.get("modules_to_not_convert"):
        patterns = _unpacked(question)
    return _excluded(substring, SOME_PARTS, question, module, patterns)


def _substring_or_wildcard(
    question: Question, module: Module, patterns: Patterns
) -> bool | Finding:
    named: bool | Finding = False
    if question.traits.drafts_blocks:
        patterns = _mapped(question, patterns)
    else:
        named = _exact(question, module, patterns)
    return named or any(substring_or_wildcard(pattern, module.prefix) for pattern in patterns)


EXCLUDE_RULES: Mapping[str, ExcludeRule] = {
    "quark": _exact_or_regex,
    "compressed-tensors": _exact_or_regex,
    "fp8": _exact,
    "awq": _substring,
    "modelopt": _substring_or_wildcard,
    "gptq": gptq_by_lists,
    "auto-round": auto_round_in_vllm,
}


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
    """Raise UnsureError where a pattern names a layer by a number that depends on the target.

    A number below the draft's own layers cannot be one of the runtime's.
    """
    for pattern in patterns if question.first_layer is None else ():
        for number in _NUMBER.findall(pattern):
            if int(number) >= question.num_layers:
                raise UnsureError(
                    f"The exclude {pattern!r} names layer {number}: vLLM counts the draft's layers"
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


def module_problem(
    question: Question, module: Module, scheme: LinearScheme, shapes: list[tuple[int, int]]
) -> Finding | None:
    """What the kernels of one quantized module, `shapes` per shard, ask of its shape."""
    rows, columns = sum(count for count, _ in shapes), shapes[0][1]
    if question.tp > 1 and is_transformed(question, module.prefix):
        text = "NotImplementedError: Online transforms with tensor parallelism is not supported"
        return Finding("init", text, "serve the draft on one GPU, or quantize without transforms")
    tiles = (scheme.signature, question.arch) in _TILES_OF_128
    if tiles and (rows % 128 or columns % 128):
        return Finding(
            "init",
            "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
            " Reasons: CutlassW4A8LinearKernel cannot implement due to: K and N must be"
            f" divisible by 128, got {(columns, rows)}",
            f"keep {module.leaf} in BF16, or quantize to FP8: recipe fp8-ptpc",
        )
    if scheme.signature in _PADDED_BLOCKS:
        return _modelopt_block_problem(module, scheme, [count for count, _ in shapes], columns)
    problem = (
        head_problem(question, module, scheme)
        or _mxfp4_problem(module, scheme)
        or powers_problem(module, scheme, columns)
    )
    if problem is not None:
        return problem
    if scheme.granularity == "block":
        problem = _block_problem(question, module, scheme, shapes)
        return problem or marlin_block_problem(question, module, scheme)
    problem = (
        integer_problem(question, module, scheme, rows, columns)
        or cut_groups(module, scheme, columns)
        or awq_problem(question, module, scheme)
    )
    return problem or group_problem("vllm", question.arch, module, scheme, columns)


def _modelopt_block_problem(
    module: Module, scheme: LinearScheme, parts: list[int], columns: int
) -> Finding | None:
    """Rows are padded to whole blocks, columns are not."""
    high, wide = scheme.block
    if columns % wide == 0:
        return _parts_problem(module, parts, high)
    text = f"ValueError: FP8_PB_WO requires in divisible by {wide}, got {columns}"
    return Finding("init", text, f"keep {module.leaf} in BF16")


def _mxfp4_problem(module: Module, scheme: LinearScheme) -> Finding | None:
    """Steps after loading of Quark's MXFP4 that want what a linear has not, or Quark itself."""
    if not scheme.signature.startswith(_BY_QUARK_ITSELF):
        return None
    if module.leaf == "kv_b_proj":
        text = "ImportError: The package `amd-quark` is required to use MX-FP4 models."
        return Finding("after load", text, "exclude kv_b_proj, or install amd-quark")
    if module.leaf == "fc" and not scheme.signature.endswith("tensor-static"):
        text = "'ReplicatedLinear' object has no attribute 'output_size_per_partition'"
        return Finding("after load", f"AttributeError: {text}", f"exclude {module.leaf}")
    return None


def _block_problem(
    question: Question, module: Module, scheme: LinearScheme, shapes: list[tuple[int, int]]
) -> Finding | None:
    """Fused linears that are let through have too few rows of scales then."""
    parts = [rows for rows, _ in shapes]
    let_through = question.method in _PARTS_OF_BLOCKS and len(parts) > 1
    high, _ = scheme.block
    if not let_through or not any(rows % high for rows in parts):
        return block_problem(question, module, shapes, scheme.block)
    return _parts_problem(module, parts, high)


def _parts_problem(module: Module, parts: list[int], high: int) -> Finding | None:
    """Scales of a fused linear whose parts end in the middle of blocks, of so many rows."""
    if not any(rows % high for rows in parts[:-1]):
        return None
    start, size = (-(-count // high) for count in (sum(parts[:-1]), sum(parts)))
    return Finding(
        "load",
        f"RuntimeError: start ({start}) + length (1) exceeds dimension size ({size}).",
        f"quantize {module.leaf} per channel: its parts are no whole blocks of {high} rows",
    )


# ---- What vLLM 0.33.0 makes of a stored scale of the KV cache, whatever it is called
# Source: `get_cache_scale_mapper` of `base_config.py`, `fp8.py` and `quark.py`,
# `AutoWeightsLoader`,
# `KVCacheScaleParameter`, and `CompressedTensorsKVCacheMethod`; executed
# (`tests/engines/kinds.py`,
# `tests/engines/foreign_mix.py`).

_OF_OUTPUTS = re.compile(r"\.self_attn\.(?:[qkv]_proj\.output_scale|prob_output_scale)$")
_OF_ATTENTION = re.compile(
    r"\.self_attn\.(?:attn\.[qkv]_(?:scale|zero_point)|(?:[kv]_proj\.)?[kv]_scale|q_scale|kv_scale"
    r"|[qkv]_zero_point)$"
)
_NO_DATA = "AttributeError: 'QKVParallelLinear' object has no attribute 'data'"
_RENAME = "rename k_proj.output_scale to k_scale, and v_proj.output_scale to v_scale"
_BY_OUTPUTS = frozenset({"fp8", "quark"})
"""Each quant_method that takes scales of the outputs of linears for those of the cache."""
_PER_TENSOR = frozenset({"fp8", "modelopt", "quark"})
_BOTH = _PER_TENSOR | {"compressed-tensors"}
"""Each quant_method whose attention has such scales; under others they are dropped."""


def cache_scale(question: Question, tensor: TensorInfo) -> bool | Finding | None:
    """Whether it reads it; a finding where it drops or refuses it."""
    method, name = question.method, tensor.name
    if method is None or question.is_latent:
        return False
    if question.own.mtp is not None:
        return None
    outputs = bool(_OF_OUTPUTS.search(name)) and method in _BY_OUTPUTS
    if not outputs and not _OF_ATTENTION.search(name):
        return False
    if outputs and not (question.traits.whole_model or question.traits.drafts_blocks):
        return Finding("load", _NO_DATA, _RENAME)
    if name.endswith("_zero_point"):  # symmetric: all zero, and never used
        return True
    if method not in _BOTH:
        text = f"vLLM drops {name}: under quant_method {method} its KV cache has no scales"
        return Finding("wrong", text, f"remove {name}: an FP8 KV cache is served with a scale of 1")
    per_head = method == "compressed-tensors" and _is_per_head(question)
    if per_head and not name.endswith("q_scale"):
        heads = question.config.get("num_key_value_heads", 0)
        return True if tensor.numel in (1, heads) else _refused(tensor, [heads])
    if per_head or tensor.numel == 1:
        return True
    if method in _PER_TENSOR:
        text = f"ValueError: KV-cache scale expects a scalar weight, got shape {tensor.shape}"
        return Finding("load", text, "store one scale per layer, not one per head")
    return _refused(tensor, [1])


def _is_per_head(question: Question) -> bool:
    keys = question.declaration.keys if question.declaration else {}
    scheme = keys.get("kv_cache_scheme")
    return isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"


def _refused(tensor: TensorInfo, shape: list[int]) -> Finding:
    text = f"AssertionError: {tensor.name} is {list(tensor.shape)}, its parameter {shape}"
    remedy = "declare the strategy attn_head in kv_cache_scheme, or store one scale per layer"
    return Finding("load", text, remedy)
