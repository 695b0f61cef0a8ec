"""How SGLang 0.5.23 reads config.json before anything else: names of architectures.

Source: `models/registry.py` and `configs/model_config.py`, executed (`tests/engines/RESULTS.md`),
whose error texts these are.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..drafts.architectures import OTHER_NAMES, declared_architecture, nested_eagle_keys
from ..drafts.engine_traits import Biases, Finding, Stage
from ..drafts.recognition import is_speculators
from .config_rules import NO_NAME, OF_LAYERS, as_class_reads
from .contract import CutHead, Declaration, Question
from .declared_forms import NO_OUTPUTS, quantizes_outputs
from .engine import TRAITS
from .engine_rows import absent_key, names_of, refused_method, version_row

ORDINARY: frozenset[str] = version_row("sglang")["config"]["architectures"]
"""Names of whole models, as which it loads a draft that has them; vLLM reads them as drafts."""
_NO_HEAD_LOADED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Names of whole models that end before a head is loaded."""
_CONFIGS = {"kimi_k2": "_KimiK2ConfigAlias", "deepseek_v3": "DeepseekV3Config"}
"""model_type -> the class of its config."""
ARCHITECTURES = ORDINARY.union(*(traits.sglang.architectures for traits in TRAITS))
_OF_MTP = frozenset().union(
    *(traits.sglang.architectures for traits in TRAITS if traits.sglang.mtp is not None)
)
_NOT_EXECUTED = names_of("sglang", "registered")  # other names of drafts that are registered
_PLAIN = "write an ordinary config.json, or serve a draft of speculators with vLLM"
_OF_DRAFTS = re.compile(
    r"(?!Mistral).*(eagle|dflash|dspark|medusa|speculator|draft)", re.IGNORECASE
)
"""Names that only drafts have; another one may be a model of Transformers."""


def plain_config(config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
    """Every config.json needs a model_type; the layout of speculators is none that it knows."""
    model_type = config.get("model_type")
    if model_type is None:
        text = "ValueError: Unrecognized model in DRAFT. Should have a `model_type` key in its"
        remedy = _PLAIN if is_speculators(config) else OF_LAYERS
        return Finding("config", f"{text} config.json.", remedy)
    if str(model_type).startswith("speculator") or model_type == "eagle":
        text = f"ValueError: The checkpoint you are trying to load has model type `{model_type}`"
        remedy = _PLAIN
        if model_type == "eagle":
            remedy = OF_LAYERS if nested_eagle_keys(config) is None else ""
        return Finding("config", f"{text} but Transformers does not recognize this", remedy)
    section = config.get("text_config")
    said = section if isinstance(section, Mapping) else {}
    if "text_config" in config and "num_attention_heads" not in said:
        error = (
            "AssertionError: sglang/srt/utils/hf_transformers/common.py:605: assert"
            ' hasattr(config.text_config, "num_attention_heads")'
        )
        return Finding("config", error, "move what stands in text_config one level up")
    return as_class_reads(config, "sglang", "ValueError: {}")


def architecture_problem(config: Mapping[str, Any]) -> Finding | None:
    """The error for a name that is not registered, if it is one of drafts, and for none."""
    name = declared_architecture(config)
    if not config.get("architectures"):
        return Finding("config", NO_NAME, "")
    if name in ARCHITECTURES or name in _NOT_EXECUTED or not _OF_DRAFTS.match(name):
        return None
    return Finding(
        "config",
        f"ValueError: Cannot find model module. {name!r} is not a registered"
        " model in the Transformers library (only relevant if the model is meant to be in"
        " Transformers) and 'AutoModel' is not present in the model config's 'auto_map'"
        " (relevant if the model is custom).",
        "",
    )


def is_ordinary(question: Question) -> bool:
    """Whether it loads a draft as a whole model, whose layers are not a draft's.

    One with num_nextn_predict_layers it takes for an MTP layer: `model_config.py:1036`.
    """
    if question.traits.whole_model:
        return False
    name = declared_architecture(question.config)
    if name in _OF_MTP and question.config.get("num_nextn_predict_layers"):
        return False
    return name in ORDINARY


def whole_model_head(question: Question) -> Finding | None:
    """A head of fewer rows than the vocabulary, in a whole model."""
    name, rows = declared_architecture(question.config), question.head_rows
    vocab = question.config.get("vocab_size")
    if not is_ordinary(question) or rows in (None, vocab) or name in _NO_HEAD_LOADED:
        return None
    text = f"AssertionError: self.org_vocab_size={vocab} self.use_presharded_weights=False"
    remedy = _as_draft(name)
    return Finding("load", f"{text} loaded_weight.shape[output_dim]={rows}", remedy)


def ordinary_model_problem(question: Question) -> Finding | None:
    """What loading as a whole model comes to, whose tensors have other names and shapes."""
    name = declared_architecture(question.config)
    if not is_ordinary(question):
        return None
    remedy = _as_draft(name)
    if name == "DeepseekV3ForCausalLM":
        config = _CONFIGS.get(str(question.config.get("model_type")), "config")
        text = f"AttributeError: {config!r} object has no attribute 'topk_method'"
        stage: Stage = "unknown" if "topk_method" in question.config else "init"
        return Finding(stage, text, remedy)
    if name == "LlamaForCausalLM" or "hidden_norm.weight" in question.tensor_names:
        what = f"SGLang loads the draft as a whole model, {name}, and drops fc.weight"
        return Finding("wrong", what, remedy)
    return Finding("load", "KeyError: 'midlayer.mlp.gate_up_proj.weight'", remedy)


def _as_draft(name: str) -> str:
    wanted = OTHER_NAMES[name]
    if wanted in ARCHITECTURES:
        return f"set architectures to {wanted}"
    return f"serve it with vLLM, as {wanted}: SGLang has no such draft"


def tied_head(question: Question) -> Finding | None:
    """`llama_eagle3.py:303` and `llama.py` put the embedding in the place of the head."""
    stored = any("lm_head." in name for name in question.tensor_names)
    if question.traits.drafts_blocks or not (question.is_tied and stored):
        return None
    whole = question.traits.whole_model
    text = "SGLang drops lm_head.weight, because tie_word_embeddings makes the embedding the head"
    remedy = "remove lm_head if it equals the embedding" if whole else "set tie_word_embeddings"
    return Finding("wrong", text, remedy if whole else f"{remedy} to false")


def biases(question: Question) -> Biases:
    """Those of the family's class; of latent attention nothing is known."""
    ordinary = question.traits.drafts_blocks or question.traits.whole_model
    latent = question.is_latent and not ordinary
    return (None, None) if latent else question.own.biases(question)


def unshared_head(question: Question) -> Finding | None:
    """`init_lm_head` of `eagle_worker_v2.py:357` asks `load_lm_head_from_target`: a null key."""
    config = question.config
    if question.traits.drafts_blocks or config.get("tie_word_embeddings"):
        return None
    if config.get("draft_vocab_size") is None:
        return None
    text = (
        "lm_head stays uninitialised: it is not stored, and SGLang takes the target's head only"
        " where draft_vocab_size is null"
    )
    remedy = "write draft_vocab_size: null into config.json"
    return Finding("wrong", text, remedy)


# ---- What SGLang 0.5.23 takes a declaration for, before it looks at any layer
# Source: `_parse_quant_hf_config` and `_verify_quantization` of `configs/model_config.py`,
# `_get_quantization_config` of `model_loader/loader.py`, and `get_min_capability` of each config.

_CAPABILITIES = {"sm80": 80, "sm90": 90, "sm100": 100, "gfx942": 94, "gfx950": 95}
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
_AUTO_ROUND_BITS = (2, 3, 4, 8)


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
    method = declaration.method or ""
    problem = _refused(declaration, arch) or absent_key("sglang", method, declaration.keys)
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
    method = declaration.method or ""
    if (refused := refused_method("sglang", method, arch)) is not None:
        return refused
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


def cut_head(question: Question, head: CutHead) -> Iterator[Finding]:
    """The head that it builds has as many rows as config.json declares; of null it is whole.

    Loading and proposing executed; `llama_eagle3.py:303`, `kimi_k25_eagle3.py:351` and
    `init_lm_head` of `eagle_worker_v2.py:336`.
    """
    if is_ordinary(question) or question.is_tied:
        return
    built = head.built if head.is_declared else head.vocabulary
    if head.stored not in (None, built):
        text = (
            f"AssertionError: self.org_vocab_size={built} self.use_presharded_weights=False"
            f" loaded_weight.shape[output_dim]={head.stored}"
        )
        yield Finding("load", text, f"write draft_vocab_size {head.stored}")
    if head.stored is None and not head.is_declared and head.mapped not in (None, head.vocabulary):
        yield Finding(
            "wrong",
            f"No lm_head is stored: SGLang serves the target's whole head, and looks its"
            f" {head.vocabulary} rows up in d2t, which has {head.mapped}",
            "store the rows of lm_head that d2t stands for, and draft_vocab_size",
        )
