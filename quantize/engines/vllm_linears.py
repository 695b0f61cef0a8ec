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
    substring,
    substring_or_wildcard,
    whole_or_parts,
)
from .mtp_linears import layer_linears

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


_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")
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
