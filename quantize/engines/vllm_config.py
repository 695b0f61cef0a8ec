"""How vLLM 0.33.0 reads config.json before anything else: names of architectures, speculators.

Sources: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs`,
executed (`tests/engines/RESULTS.md`), whose error texts these are.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..drafts.architectures import REWRITTEN_BY_VLLM, declared_architecture, nested_eagle_keys
from ..drafts.engine_traits import INVALID, UNSUPPORTED, Biases, EngineTraits, Finding
from ..drafts.family import LAYER_CONFIG
from . import mtp_linears as mtp
from .config_rules import NO_NAME, OF_LAYERS, as_class_reads, draft_traits
from .contract import CutHead, Declaration, Question
from .declared_forms import NO_OUTPUTS, quantizes_outputs
from .engine import TRAITS
from .engine_rows import absent_key, names_of, refused_method
from .linear_scheme import Group

ARCHITECTURES = frozenset().union(*(traits.vllm.architectures for traits in TRAITS))
_NOT_EXECUTED = names_of("vllm", "registered").union(*(t.vllm.not_executed for t in TRAITS))
"""Other names of drafts that are registered, under methods and with tensors of their own."""
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_OF_MTP = re.compile(r"NextN$|MTP|^(?!.*(eagle|dflash|dspark)).*For(CausalLM|Conditional)", re.I)
_REWRITTEN = re.compile(
    r"(deepseek_(v3|v32|v4|v41|mtp)|glm_moe_dsa|glm5_next|dots3_note|pangu_ultra_moe|kimi_k3"
    r"|ernie4_5_moe|ernie|nemotron_h(_puzzle)?|qwen3_next|qwen4_exp(_text)?|qwen3_5(_moe)?(_text)?"
    r"|bailing_hybrid(_v3)?|exaone_moe|exaone4_5|intern_s2_preview|interns2_mobius|longcat_flash"
    r"|step3p[57]|step5(_vl)?|hy_v[34]|inkling(_mm)?_model|gemma4(_unified)?_assistant"
    r"|minimax_m3(_vl)?|mimo(_v2)?|glm4_moe(_lite)?|glm_ocr)(_mtp)?"
)
"""model_types for which it writes the name of an MTP layer: `config/speculative.py:711`."""


def rewritten(traits: EngineTraits | None, config: Mapping[str, Any]) -> Finding | None:
    """The error for a draft whose model_type is one of targets with an MTP layer."""
    model_type = config.get("model_type")
    if not (traits and traits.usual_type) or model_type not in tuple(REWRITTEN_BY_VLLM):
        return None
    name = REWRITTEN_BY_VLLM[model_type]
    error = UNSUPPORTED.format(f"{'DFlash' if traits.drafts_blocks else 'Eagle3'}{name}")
    what = f"set model_type to {traits.usual_type}: {model_type} is rewritten to the MTP model"
    return Finding("config", error, what)


def architecture_problem(config: Mapping[str, Any]) -> Finding | None:
    """No other name is registered, alone or behind the "Eagle" or "Eagle3" of `EAGLEConfig`."""
    name, model_type = declared_architecture(config), config.get("model_type")
    if model_type == "eagle":  # which reads the keys below "model", and is EAGLE-1 by default
        return _of_eagle_config(config)
    if not config.get("architectures"):
        return Finding("config", NO_NAME, "")
    if not name or name in ARCHITECTURES or name in _NOT_EXECUTED:
        return None
    if _OF_MTP.search(name) and _REWRITTEN.fullmatch(str(model_type)):
        return None
    return Finding("config", UNSUPPORTED.format(name), "")


def _of_eagle_config(config: Mapping[str, Any]) -> Finding:
    nested = nested_eagle_keys(config)
    if nested is None:
        text = "Assertion failed, model should not be None when method is eagle"
        return Finding("config", INVALID.format(text), OF_LAYERS)
    name = declared_architecture(nested)
    return Finding("config", UNSUPPORTED.format(f"Eagle{name}") if name else NO_NAME, "")


def biases(question: Question) -> Biases:
    """Those of the family's class; of latent attention nothing is known."""
    latent = question.is_latent and not question.traits.drafts_blocks
    return (None, None) if latent else question.own.biases(question)


def _no_mask(question: Question) -> Finding | None:
    """`get_parallel_drafting_token_id` of `v1/worker/gpu/spec_decode/utils.py:92`, of a server."""
    nested = question.config.get("dflash_config")
    said = {**question.config, **(nested if isinstance(nested, Mapping) else {})}
    if not question.traits.drafts_blocks or any(said.get(key) is not None for key in _MASK_KEYS):
        return None
    text = "ValueError: Model config must specify `dflash_config.mask_token_id`,"
    return Finding("init", text, "add mask_token_id, as the draft was trained with it")


def config_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig`, of the family's loader, and of a head of fewer tokens."""
    if question.own.mtp is not None:
        return mtp.vllm_problem(question, question.own.mtp)
    problem = (
        rewritten(question.traits, question.config)
        or question.own.problem(question)
        or _no_mask(question)
    )
    if problem is not None or not question.traits.prunes_vocabulary:
        return problem
    size, whole = question.config.get("draft_vocab_size"), question.config.get("vocab_size")
    if size in (None, whole) and "d2t" in question.tensor_names:
        text = "ValueError: There is no module or parameter named 'draft_id_to_target_id'"
        pruned = question.head_rows not in (None, whole)
        remedy = "add draft_vocab_size to config.json" if pruned else "remove d2t and t2d"
        return Finding("load", text, remedy)
    rows = question.head_rows
    if size is None and rows is not None and rows != whole:
        return Finding(
            "load",
            "AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515: assert"
            " loaded_weight.shape[output_dim] == self.org_vocab_size",
            f"add draft_vocab_size {rows} to config.json, and the map d2t",
        )
    return None


# ---- How vLLM 0.33.0 reads a config.json in the layout of speculators: as an ordinary one
# Source: `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs/speculators`, and
# `get_config`; executed with keys left out (`tests/engines/RESULTS.md`), whose error texts these
# are.
# Unlike the configs of ordinary drafts, this one has no defaults.

_ATTRIBUTE = "AttributeError: 'SpeculatorsConfig' object has no attribute '{}'"
_SAVE = "save the draft again with the speculators package"
_NOT_READ = {
    "mtp": "put the layer back into its target: scripts/stitch_mtp.py of speculators",
}
"""Kinds of the package that vLLM has no reading of -> what serves them."""
_NEEDED = ("intermediate_size", "hidden_act", "rms_norm_eps")
_NEEDED_BY_QWEN3 = ("max_position_embeddings", "num_key_value_heads")
_READ = {kind: how for traits in TRAITS for kind, how in traits.vllm.speculators.items()}


def plain_config(config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
    """The ordinary config.json as which vLLM reads one, or its error."""
    model_type = config.get("model_type")
    if model_type is None and config.get("speculators_config") is None:
        text = INVALID.format(
            "Unrecognized model in DRAFT. Should have a `model_type` key in its config.json."
        )
        return Finding("config", text, f"{OF_LAYERS}; or add speculators_config")
    if model_type == "eagle":
        return config  # which `architecture_problem` reads
    if model_type not in (None, "speculators"):
        return rewritten(draft_traits(config), config) or as_class_reads(config, "vllm", INVALID)
    kind = config.get("speculators_model_type")
    if kind not in tuple(_READ):  # of any JSON type
        if remedy := _NOT_READ.get(str(kind)):
            return Finding("config", INVALID.format("Expected one of: "), remedy)
        if isinstance(kind, str):
            text = f"Loading speculators_model_type {kind} was never executed"
            return Finding("unknown", text, "try it")
        return Finding("config", INVALID.format("Expected one of: "), "add speculators_model_type")
    layers = config.get(LAYER_CONFIG)
    if not isinstance(layers, Mapping):
        return Finding("init", _ATTRIBUTE.format("vocab_size"), _SAVE)
    qwen3 = _READ[kind].qwen3 or layers.get("model_type") == "qwen3"
    needed = (*(_NEEDED_BY_QWEN3 if qwen3 else ()), *_NEEDED)
    absent = next((key for key in needed if key not in layers), None)
    own = _READ[kind].read(config, layers)
    if isinstance(own, Finding):
        return own
    if absent is not None:
        return Finding("init", _ATTRIBUTE.format(absent), f"add {absent!r} to {LAYER_CONFIG}")
    null = next((key for key in _NEEDED_BY_QWEN3 if layers.get(key, 0) is None), None)
    if null is not None:
        text = f"TypeError: {null} is null in {LAYER_CONFIG}"
        return Finding("init", text, f"give {null!r} its value")
    shared = {
        "draft_vocab_size": config.get("draft_vocab_size"),
        "quantization_config": config.get("quantization_config")
        or layers.get("quantization_config"),
    }
    if config.get("target_hidden_size") is not None:
        shared["target_hidden_size"] = config["target_hidden_size"]
    return {**layers, **shared, **own}


# ---- What vLLM 0.33.0 takes a declaration for, or why it refuses it, before it looks at any layer
# Source: `_verify_quantization` and `_normalize_quantization_config` of `config/model.py`,
# `QUANTIZATION_METHODS`, and `supported_quantization` of `platforms/rocm.py`.

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
_OF_MXFP8 = "modelopt_mxfp8"  # the quant_method that says the algorithm
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
    problem = _refused(declaration, arch) or absent_key("vllm", method or "", keys)
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
    """A quant_method by its name; sparsity by targets, which was taken out; quantized outputs."""
    method, keys = declaration.method or "", declaration.keys
    if (refused := refused_method("vllm", method, arch)) is not None:
        return refused
    sparsity = keys.get("sparsity_config") if method == "compressed-tensors" else None
    if isinstance(sparsity, dict) and sparsity.get("targets"):
        text = (
            "DeprecationWarning: Sparsity support has been removed from compressed-tensors. Please"
            " use a model without sparsity configuration."
        )
        return Finding("config", text, _DEQUANTIZE)
    if method == "quark" and quantizes_outputs(keys):
        return Finding("init", NO_OUTPUTS, _DEQUANTIZE)
    return None


def cut_head(_question: Question, head: CutHead) -> Iterator[Finding]:
    """The head that it builds has as many rows as config.json declares.

    Loading and proposing executed; `_should_share` of
    `v1/worker/gpu/spec_decode/eagle/utils.py:24` and `llm_base_proposer.py:1513` put the target's
    head in the place of one that is not stored, whatever its size.
    """
    if head.stored is None and head.is_cut:
        yield Finding(
            "wrong",
            f"No lm_head is stored: vLLM puts the target's in its place, and takes the first"
            f" {head.built} rows of it for the tokens of d2t",
            "store the rows of lm_head that d2t stands for",
        )
    if head.stored in (None, head.built) or not head.is_declared:
        return
    if head.mapped not in (None, head.built) and head.is_cut:
        text = (
            f"AssertionError: Attempted to load weight (torch.Size([{head.mapped}])) into parameter"
            f" (torch.Size([{head.built}]))"
        )
    else:
        text = (
            "AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515: assert"
            " loaded_weight.shape[output_dim] == self.org_vocab_size"
        )
    yield Finding("load", text, f"write draft_vocab_size {head.stored}, if d2t has as many rows")
