"""How vLLM reads a draft: its config.json, declaration, linears, head and scales of the KV cache.

Executed with 0.33.0's own classes on faked GPUs (`experiments/engines/RESULTS.md`), whose error
texts these are, or read: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of
`vllm/transformers_utils/configs`, `vllm/model_executor/layers/quantization`, `config/model.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from operator import eq
from typing import Any

from typing_extensions import override

from ...recipes.errors import short
from ..drafts.architectures import REWRITTEN_BY_VLLM
from ..drafts.config_reader import KEY, SECTION, object_at
from ..drafts.engine_traits import QKV, UNSUPPORTED, EngineTraits, Finding, MtpLayer
from ..drafts.family import LAYER_CONFIG
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import COMPANIONS
from .built_linears import is_cache_scale
from .config_rules import DFLASH_KEY, DFLASH_SECTION, as_class_reads, draft_traits, layer_ids
from .contract import TRY, UNKNOWN_FIRST_LAYER, Captures, Module, Question, UnsureError
from .declared_forms import Declaration
from .engine import TRAITS, BuildingEngine, Serving
from .excludes import (
    QUANTIZED_HEADS,
    Matching,
    Patterns,
    exact_or_regex,
    extra_heads,
    whole_or_parts,
)

_ATTRIBUTE = "AttributeError: 'SpeculatorsConfig' object has no attribute '{}'"
_NEEDED = ("intermediate_size", "hidden_act", "rms_norm_eps")
_NEEDED_BY_QWEN3 = ("max_position_embeddings", "num_key_value_heads")
_READ = {kind: how for traits in TRAITS for kind, how in traits.vllm.speculators.items()}
_OWN_HEAD = "has_own_lm_head"
"""The key of config.json by which DFlash gives its head the declaration: `qwen3_dflash.py:760`."""
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")
_WITH_CACHE_SCALES = ("fp8", "modelopt", "quark", "compressed-tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm(BuildingEngine):
    """One version of vLLM."""

    @override
    def launched(self, question: Question, tokens: int, serving: Serving) -> Mapping[str, object]:
        """The draft's settings go into `--speculative-config`.

        Without `draft_tensor_parallel_size` the draft is split as the target is. The only other one
        that it accepts is 1 (`config/speculative.py:1849`), and then only the loaders of DSpark and
        of language models use it.
        """
        config = {
            "method": question.own.served_as,
            "model": serving.draft,
            "num_speculative_tokens": tokens,
            "parallel_drafting": question.is_parallel or None,
            "draft_tensor_parallel_size": question.tp if question.tp > 1 else None,
            "kv_cache_dtype": serving.cache_dtype or None,
        }
        return {"config": json.dumps({k: v for k, v in config.items() if v is not None})}

    @override
    def plain_config(self, config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
        if config.get("model_type") not in (None, "speculators"):
            return _rewritten(draft_traits(config), config) or as_class_reads(config, self)
        return _speculators_config(config)

    @override
    def config_problem(self, question: Question) -> Finding | None:
        """`names_mask`: as `v1/worker/gpu/spec_decode/utils.py:92` looks for it."""
        if question.own.mtp is not None:
            return self._mtp_problem(question, question.own.mtp)
        config, whole = question.config, question.config.get("vocab_size")
        there = {**config, **object_at(config, "dflash_config")}
        facts = {
            **question.facts,
            "names_mask": any(there.get(key) is not None for key in _MASK_KEYS),
            "has_map": "d2t" in question.tensor_names,
            "is_cut": config.get("draft_vocab_size") not in (None, whole),
            "head_is_whole": question.head_rows in (None, whole),
        }
        problem = _rewritten(question.traits, config) or question.own.problem(question)
        return problem or self.rule("config", **facts)

    def _mtp_problem(self, question: Question, served: MtpLayer) -> Finding | None:
        """It applies the target's quantization to most MTP layers, never the draft's own.

        With the same declaration in the target's config the folder loads (executed).
        """
        problem = served.misconfigured(question)
        if problem is not None or question.declaration is None or question.inside_target:
            return problem
        if served.declared is not None:
            return served.declared(question)
        stored = sorted(n for n in question.tensor_names if n.rpartition(".")[2] in COMPANIONS)
        return self.rule("declared_mtp", name=stored[0]) if stored else None

    @override
    def captures(self, config: Mapping[str, Any]) -> Captures:
        """By the V2 model runner; V1, where there is no Triton, reads eagle_config too."""
        block, eagle = object_at(config, DFLASH_SECTION), object_at(config, SECTION)
        read = (
            layer_ids(config.get(KEY)),
            layer_ids(block.get(DFLASH_KEY), plus=1),
            layer_ids(config.get(DFLASH_KEY), plus=1),
            layer_ids(block.get("layer_ids")),
            layer_ids(eagle.get("layer_ids")),
        )
        return next(filter(None, read), None)

    @override
    def taken(self, declaration: Declaration) -> Declaration:
        """`_normalize_quantization_config`: ModelOpt's nested form needs no quant_method."""
        if not declaration.method and declaration.algorithm is None:
            return replace(declaration, method=None)
        nested = declaration.form != "flat" and declaration.by_modelopt
        return replace(declaration, method="modelopt") if nested else declaration

    @override
    def excludes(self, question: Question, module: Module, layout: str, patterns: Patterns) -> bool:
        match layout:
            case "quark" | "compressed-tensors":
                return _excluded(exact_or_regex, question, module, patterns)
            case "awq":
                if not question.keys.get("modules_to_not_convert"):
                    patterns = _unpacked(question)
                return _excluded(lambda pattern, name: pattern in name, question, module, patterns)
            case "fp8":
                return _excluded(eq, question, module, patterns)
            case "modelopt":
                name, mapped = module.prefix, question.traits.vllm.maps_excludes
                patterns = _mapped(question, patterns) if mapped else patterns
                named = not mapped and _excluded(eq, question, module, patterns)
                return named or any(p in name or fnmatch(name, p) for p in patterns)
        raise UnsureError(f"How {self.title} leaves linears out of {layout} was never executed")

    @override
    def layer_names(self, question: Question, layer: int, path: str) -> tuple[str, str]:
        """Parameters count the draft's layers from 0; excludes count them after the target's.

        A language model counts only its own, below the name that it is built under
        (`v1/worker/gpu/spec_decode/standalone_ar/speculator.py:129`). `qwen3_eagle3.py` builds
        qkv_proj again, and forgets that it is part of self_attn.
        """
        whole, first = question.traits.whole_model, question.first_layer or UNKNOWN_FIRST_LAYER
        number = layer + (0 if whole or question.traits.vllm.counts_from_0 else first)
        forgets = question.traits.vllm.forgets_attention and question.geometry.normed_heads
        excluded = QKV.vllm if forgets and path.endswith(QKV.vllm) else path
        root = "draft_model." if whole else ""
        return f"model.layers.{layer}.{path}", f"{root}model.layers.{number}.{excluded}"

    @override
    def other_modules(self, question: Question) -> Iterator[Module]:
        if (joined := question.traits.joins_layers) is not None:
            inside = f"self_attn.{joined.part}"
            parts = tuple(f"layers.{i}.{inside}" for i in range(question.num_layers))
            _, prefix = self.layer_names(question, 0, f"self_attn.{joined.fused.vllm}")
            yield Module(f"model.{joined.name}", prefix, parts, "replicated")
        for each in question.traits.extra_linears:
            prefix = f"model.{each.name}" if each.is_head else each.name
            yield Module(f"model.{each.name}", prefix, (each.name,), "replicated")
        if question.traits.head == "own" or not question.is_tied:
            root = "draft_model." if question.traits.whole_model else ""
            yield Module("lm_head", f"{root}lm_head", ("lm_head",), "column")

    @override
    def plain(self, question: Question) -> frozenset[str]:
        """The head, where the class passes it no config or the method cannot quantize heads.

        `llama_eagle3.py:332`, `qwen3_eagle3.py:308` and `qwen3_dflash.py:755` give ParallelLMHead a
        config, `deepseek_eagle3.py:225` gives it none.
        """
        heads = {"lm_head", *extra_heads(question)}
        if question.method in QUANTIZED_HEADS:
            declared, asked = question.traits.vllm.head_declared, question.config.get(_OWN_HEAD)
            handed = declared == "always" or (declared == "asked" and asked)
            heads = set() if handed else {"lm_head"}
        others = {each.leaf for each in question.traits.extra_linears if not each.is_head}
        return frozenset({*others, *heads})

    @override
    def plain_remedy(self, question: Question, leaf: str) -> str:
        if leaf == "lm_head" and question.traits.drafts_blocks:
            return f"write {_OWN_HEAD}: true into config.json"
        return BuildingEngine.plain_remedy(self, question, leaf)

    @override
    def cache_scale(self, question: Question, tensor: TensorInfo) -> bool | None:
        """Source: `KVCacheScaleParameter`; executed (`experiments/engines/cache_scales.json`)."""
        method, is_own = question.method, is_cache_scale(tensor) and question.own.mtp is None
        if method is None or question.is_latent:
            return False
        return True if is_own and method in _WITH_CACHE_SCALES else None


def _rewritten(traits: EngineTraits | None, config: Mapping[str, Any]) -> Finding | None:
    """The error for a draft whose model_type is that of targets with an MTP layer."""
    model_type = config.get("model_type")
    if not (traits and traits.usual_type) or model_type not in tuple(REWRITTEN_BY_VLLM):
        return None
    name = f"{'DFlash' if traits.drafts_blocks else 'Eagle3'}{REWRITTEN_BY_VLLM[model_type]}"
    remedy = f"set model_type to {traits.usual_type}: {model_type} is rewritten to the MTP model"
    return Finding("config", UNSUPPORTED.format(name), remedy)


def _speculators_config(config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
    """One of speculators as an ordinary config.json; unlike those of drafts it has no defaults."""
    kind, layers = config.get("speculators_model_type"), config.get(LAYER_CONFIG)
    if kind not in tuple(_READ) or not isinstance(layers, Mapping):  # of any JSON type
        what = f"Loading speculators_model_type {short(kind)} in this form was never executed"
        return Finding("unknown", what, TRY)
    of_kind = _READ[kind].read(config, layers)
    if isinstance(of_kind, Finding):
        return of_kind
    qwen3 = _READ[kind].qwen3 or layers.get("model_type") == "qwen3"
    for key in (*(_NEEDED_BY_QWEN3 if qwen3 else ()), *_NEEDED):
        if key not in layers:
            return Finding("init", _ATTRIBUTE.format(key), f"add {key!r} to {LAYER_CONFIG}")
    shared = {
        "draft_vocab_size": config.get("draft_vocab_size"),
        "quantization_config": config.get("quantization_config")
        or layers.get("quantization_config"),
    }
    if config.get("target_hidden_size") is not None:
        shared["target_hidden_size"] = config["target_hidden_size"]
    return {**layers, **shared, **of_kind}


# ---- Excludes. Without a list of fused parts q_proj does not mean qkv_proj:
# `Question.names_of_parts`.


def _excluded(matched: Matching, question: Question, module: Module, patterns: Patterns) -> bool:
    """Raise UnsureError where a pattern names a layer by a number that depends on the target.

    A number below the draft's own layers cannot belong to the runtime.
    """
    for pattern in patterns if question.first_layer is None else ():
        for number in _NUMBER.findall(pattern):
            if int(number) >= question.num_layers:
                raise UnsureError(
                    f"The exclude {pattern!r} names layer {number}: vLLM counts the draft's layers"
                    " after the target's, whose number is not known here (--target-layers)"
                )
    return whole_or_parts(matched, patterns, module, question.names_of_parts(module))


def _mapped(question: Question, patterns: Patterns) -> Patterns:
    """`map_draft_quant_config`: for DFlash in ModelOpt's layout, disk names become runtime's."""
    first = question.first_layer or UNKNOWN_FIRST_LAYER
    mapped = []
    for pattern in patterns:
        tree = len(pattern) >= 2 and pattern.endswith("*") and not pattern.endswith(".*")
        for name in (pattern[:-1], f"{pattern[:-1]}.*") if tree else (pattern,):
            renamed = re.sub(
                r"^((?:model\.)?\*?)layers\.(\d+)(?=\.|\*|$)",
                lambda match: f"{match[1]}layers.{int(match[2]) + first}",
                name,
            )
            rooted = renamed.startswith("*") or re.match(r"model(?:\.|\*|$)", renamed)
            mapped.append(renamed if rooted else f"model.{renamed}")
    return tuple(mapped)


def _unpacked(question: Question) -> Patterns:
    """AWQ without a list: a linear with a plain weight is not quantized."""
    names = question.tensor_names
    plain = (name.removesuffix(".weight") for name in sorted(names) if name.endswith(".weight"))
    return tuple(module for module in plain if f"{module}.qweight" not in names)
