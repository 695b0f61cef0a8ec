"""What SGLang does with a draft: loading executed with 0.5.23's own classes on faked GPUs.

Error texts are its own (`tests/engines/RESULTS.md`); rules were read in `sglang/srt`.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..drafts.architectures import declared_architecture
from ..drafts.engine_traits import GATE_UP, MLA_DOWN, QKV, Finding
from ..files.safetensors_header import TensorInfo
from . import mtp_linears as mtp
from .contract import Module, Question
from .engine import ExcludeRule
from .engine_rows import concatenated
from .excludes import (
    SOME_PARTS,
    Patterns,
    any_transform,
    auto_round_in_sglang,
    by_parts,
    dotted_path,
    exact_or_regex,
    gptq_by_rules,
    star_on_parts,
    suffix_or_regex,
    whole_or_parts,
)
from .mtp_linears import layer_linears
from .sglang_config import is_ordinary, ordinary_model_problem, tied_head, whole_model_head

_QUANTIZED_HEADS = frozenset({"modelopt", "compressed-tensors"})
"""Each quant_method that has something for a head: `compressed_tensors.py:202`, and in
`modelopt_quant.py:341`."""
_SOME_SCHEMES = (
    "Found different quantization schemes for {} in {{}}. SGLang requires all to use the same"
    " scheme."
)


def modules(question: Question) -> tuple[Module, ...]:
    """Excludes are held against names without the layer. Of a whole model no linears are known."""
    traits, own = question.traits, question.traits.sglang
    if is_ordinary(question):
        return ()
    if own.mtp is not None:
        return mtp.modules(question, own.mtp, lambda fused: fused.sglang)
    found = []
    for i in range(question.num_layers):
        linears = layer_linears(traits, f"layers.{i}", lambda fused: fused.sglang)
        for path, parts, sharding in linears:
            leaf = path.rpartition(".")[2]
            said = {"n": i, "path": path, "leaf": leaf, "inner": path if leaf == "o_proj" else leaf}
            name, prefix = own.layer_name.format(**said), own.layer_prefix.format(**said)
            found.append(Module(name, prefix, parts, sharding))
    root = "" if traits.drafts_blocks else "model."
    # It builds fc for a draft without one as well, and does not use it: `llama_eagle3.py`, forward.
    if question.fuses:
        found.append(Module(f"{root}fc", f"{root}fc", ("fc",), own.fc_sharding))
    found += [
        Module(each.name, each.name, (each.name,), "replicated") for each in traits.extra_linears
    ]
    # The head of a block draft is the target's: `dflash_worker_v2.py:138`.
    if question.has_head and not traits.drafts_blocks and not question.is_tied:
        found.append(Module("lm_head", "lm_head", ("lm_head",), "column"))
    return tuple(found)


def plain(question: Question) -> frozenset[str]:
    """Plain torch: fc of the Llama draft (`llama_eagle3.py:163`) and of DFlash (`dflash.py:772`).

    Convolutions, what stands in no layer (`dflash.py:564,1184`), and the head where nothing hands
    it the config; that of a block draft is the target's.
    """
    traits = question.traits
    head_too = not traits.drafts_blocks and question.method in _QUANTIZED_HEADS
    leaves = {"kernel_projection", *(each.leaf for each in traits.extra_linears)}
    leaves |= set() if head_too else {"lm_head"}
    return frozenset(leaves | {"fc"} if traits.sglang.plain_fc else leaves)


# One rule per layout; most ask for the parts of a fused linear, some whatever its class lists.


def _substring(_question: Question, module: Module, patterns: Patterns) -> bool:
    return any(pattern in module.prefix for pattern in patterns)


def _suffix_or_regex(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    parts = question.names_of_parts(module) or (module.prefix,)
    error = _SOME_SCHEMES.format([part.rpartition(".")[2] for part in parts])
    return module.prefix in patterns or by_parts(suffix_or_regex, patterns, module, parts, error)


def _whole_or_parts(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    always = module.leaf in (GATE_UP.sglang, MLA_DOWN.sglang)
    parts = module.part_prefixes if always else question.names_of_parts(module)
    error = _SOME_SCHEMES.format([part.rpartition(".")[2] for part in parts])
    return whole_or_parts(exact_or_regex, patterns, module, parts, error)


def _dotted_parts(_question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    fused = module.leaf in (QKV.sglang, GATE_UP.sglang)
    parts = module.part_prefixes if fused else (module.prefix,)
    return by_parts(dotted_path, patterns, module, parts, SOME_PARTS)


def _parts_or_stars(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    skipped = _dotted_parts(question, module, patterns)
    if skipped is False:
        return any(star_on_parts(p, module.prefix) or _names_latent(p, module) for p in patterns)
    return skipped


EXCLUDE_RULES: Mapping[str, ExcludeRule] = {
    "quark": _whole_or_parts,
    "compressed-tensors": _suffix_or_regex,
    "fp8": _dotted_parts,
    "awq": _substring,
    "modelopt": _parts_or_stars,
    "gptq": gptq_by_rules,
    "auto-round": auto_round_in_sglang,
    "w8a8_fp8": lambda *_asked: False,
    "w8a8_int8": lambda *_asked: False,
    "blockwise_int8": _dotted_parts,
}


def _names_latent(pattern: str, module: Module) -> bool:
    """ModelOpt's excludes name the parts of MLA, which are looked for in the fused name."""
    tail = pattern.rpartition(".")[2]
    return tail in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj") and (
        tail in module.leaf
    )


def is_float16_only(question: Question) -> bool:
    """AWQ in kernels of its own, where Marlin takes it not; without torch_dtype it is float16."""
    return question.method == "awq" and not question.is_marlin


def config_problem(question: Question) -> Finding | None:
    """Rules for config.json."""
    config, own = question.config, question.traits.sglang
    if (problem := whole_model_head(question) or own.problem(question)) is not None:
        return problem
    if is_float16_only(question):
        dtype = config.get("torch_dtype", config.get("dtype"))
        if dtype == "bfloat16":
            return Finding(
                "config",
                "ValueError: torch.bfloat16 is not supported for quantization method"
                f" {question.method}. Supported dtypes: [torch.float16]",
                "set torch_dtype to float16, or serve with --dtype float16",
            )
    if own.mtp is not None and (problem := mtp.sglang_problem(question, own.mtp)) is not None:
        return problem
    if (problem := ordinary_model_problem(question)) is not None:
        return problem
    if own.most_layers is not None and question.num_layers > own.most_layers:
        return Finding(
            "init",
            "ValueError: EAGLE3 currently only supports 1 layer",
            "serve it with vLLM, or train a draft of one layer",
        )
    if (problem := own.problem_as_draft(question)) is not None:
        return problem
    # A null key is there: the head is then the target's.
    if own.needs_draft_vocab_size and "draft_vocab_size" not in config:
        return Finding(
            "init",
            "AttributeError: 'LlamaConfig' object has no attribute 'draft_vocab_size'",
            "add draft_vocab_size to config.json",
        )
    if (problem := tied_head(question)) is not None:
        return problem
    if any_transform(question):
        text = "SGLang does not read transform_config, and serves the linears without transforms"
        return Finding("wrong", text, "serve it with vLLM, or quantize without online transforms")
    if question.is_parallel:
        text = "SGLang drops mask_hidden: it does not draft EAGLE-3's tokens in parallel"
        return Finding("wrong", text, "serve it with vLLM")
    return None


def codes_in_floats(question: Question, module: Module) -> Finding | None:
    """The loader puts q_a and kv_a together before it looks who takes them."""
    groups = question.declaration.groups if question.declaration else ()
    errors = [concatenated().get(group.scheme.signature) for group in groups]
    if module.leaf != MLA_DOWN.sglang or not any(errors):
        return None
    text = next(filter(None, errors))
    return Finding("load", text, "use FP8 per channel with dynamic tokens: recipe fp8-ptpc")


def stranger(question: Question, name: str) -> str | None:
    """`qwen3.py:742` looks up a part of a fused linear unasked; for a bias it asks."""
    served = question.own.mtp
    if served is not None and served.no_parameter:  # `mimo_mtp.py`, load_weights
        return served.no_parameter.format(name=mtp.in_engine(name, served.layer))
    module, _, suffix = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    named = declared_architecture(question.config) == "Qwen3ForCausalLM"
    renamed = ("bias", "output_scale", "k_scale", "v_scale")  # but the first: of the KV cache
    if not named or leaf not in (*QKV.members, *GATE_UP.members) or suffix in renamed:
        return None
    fused = QKV if leaf in QKV.members else GATE_UP
    return f"KeyError: '{module.removesuffix(leaf)}{fused.sglang}.{suffix}'"


# ---- What SGLang 0.5.23 makes of a stored scale of the KV cache, whatever it is called
# Source: `maybe_remap_kv_scale_name`, which `llama.py` alone calls for a draft, and the methods of
# `RadixAttention`; executed (`tests/engines/kinds.py`, `tests/engines/foreign_mix.py`).

_RENAMED = re.compile(
    r"\.self_attn\.(?:[kv]_scale|kv_scale|k_proj\.(?:k_scale|output_scale)"
    r"|v_proj\.(?:v_scale|output_scale))$"
)
_OWN = re.compile(r"\.self_attn\.attn\.[kv]_scale$")
_RENAMING = "LlamaForCausalLM"


def cache_scale(question: Question, tensor: TensorInfo) -> bool | Finding | None:
    """Whether it reads it; a finding where it refuses it. What it does not read it drops."""
    if tensor.name.endswith("_zero_point"):  # symmetric: all zero, and never used
        return True
    mtp = question.own.mtp
    if mtp is not None:  # some loaders look it up without asking whether it is there
        own = _OWN.search(tensor.name) is not None
        return mtp.cache_scales and _has_scales(question) if own else False
    renames = declared_architecture(question.config) == _RENAMING
    names = _RENAMED if renames else _OWN
    if not _has_scales(question) or question.is_latent:
        return False
    if not names.search(tensor.name) or (question.traits.whole_model and not renames):
        return False
    if tensor.numel == 1:
        return True
    text = f"AssertionError: Attempted to load weight (torch.Size({list(tensor.shape)}))"
    remedy = "store one scale per layer, not one per head"
    return Finding("load", f"{text} into parameter (torch.Size([]))", remedy)


def _has_scales(question: Question) -> bool:
    """Whether the attention of a draft has scales that a tensor can fill."""
    method = question.method
    keys = question.declaration.keys if question.declaration else {}
    if method == "compressed-tensors":
        return _is_one_per_layer(keys.get("kv_cache_scheme"))
    if method == "modelopt" and question.declaration and question.declaration.form == "nested":
        return False  # `_parse_modelopt_quant_config` leaves its algorithm alone
    if method == "modelopt":
        scheme = keys.get("kv_cache_scheme")
        return isinstance(scheme, Mapping) or bool(keys.get("kv_cache_quant_algo"))
    return method in ("fp8", "quark")


def _is_one_per_layer(scheme: Any) -> bool:
    """`CompressedTensorsKVCacheMethod.is_supported_scheme`; another one is ignored."""
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    return (
        isinstance(scheme, Mapping)
        and all(scheme.get(key) == value for key, value in wanted.items())
        and scheme.get("symmetric", True)
        and not scheme.get("dynamic", False)
    )
