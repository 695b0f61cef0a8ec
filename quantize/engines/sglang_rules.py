"""How SGLang reads a draft: its config.json, declaration, linears, head and scales of the KV cache.

Executed with 0.5.23's own classes on faked GPUs (`experiments/engines/RESULTS.md`), whose error
texts these are, or read: `models/registry.py` and `configs/model_config.py`, and the rest of
`sglang/srt`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import DEEPSEEK_TYPES, KEY, SECTION, object_at
from ..drafts.engine_traits import GATE_UP, MLA_DOWN, QKV, Finding
from ..files.safetensors_header import TensorInfo
from . import built_linears as built
from .config_rules import DFLASH_KEY, DFLASH_SECTION, as_class_reads, layer_ids
from .contract import Captures, Module, Question, UnsureError
from .declared_forms import Declaration
from .engine import BuildingEngine, Serving
from .excludes import (
    QUANTIZED_HEADS,
    Patterns,
    by_parts,
    dotted_path,
    exact_or_regex,
    star_on_parts,
    suffix_or_regex,
    whole_or_parts,
)

_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_RENAMING = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sglang(BuildingEngine):
    """One version of SGLang. Excludes are compared with names without the layer."""

    @override
    def launched(self, question: Question, tokens: int, serving: Serving) -> Mapping[str, object]:
        """Plain "fp8", vLLM's word for E4M3, is not a choice in SGLang."""
        caches = (serving.target_cache_dtype, serving.cache_dtype)
        theirs, own = ("fp8_e4m3" if dtype == "fp8" else dtype for dtype in caches)
        blocks = question.traits.drafts_blocks
        counted = not blocks or question.traits.sglang.counts_anchor
        return {
            "target_cache_dtype": theirs,
            "cache_dtype": own,
            "steps": None if blocks else tokens,
            "tokens": tokens + 1 if counted else None,
            "backend": question.traits.sglang.attention_backend(question) or None,
            "dtype": "float16" if question.is_float16_only else serving.dtype,
        }

    @override
    def plain_config(self, config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
        return as_class_reads(config, self)

    @override
    def config_problem(self, question: Question) -> Finding | None:
        """`needs_draft_vocab_size`: a null key counts: the head is then the target's.

        `drops_head`: `llama_eagle3.py:303` and `llama.py` use the embedding as the head.
        """
        config, traits, sglang = question.config, question.traits, question.traits.sglang
        stored = any("lm_head." in each for each in question.tensor_names)
        absent = "draft_vocab_size" not in config
        facts = {
            **question.facts,
            "torch_dtype": config.get("torch_dtype", config.get("dtype")),
            "is_float16_only": question.is_float16_only,
            "is_parallel": question.is_parallel,
            "too_many_layers": question.num_layers > (sglang.most_layers or question.num_layers),
            "needs_draft_vocab_size": sglang.needs_draft_vocab_size and absent,
            "drops_head": not traits.drafts_blocks and question.is_tied and stored,
        }
        return (
            self.rule("dtype", **facts)
            or sglang.problem(question)
            or (sglang.mtp and sglang.mtp.misconfigured(question))
            or self.rule("config", **facts)
        )

    @override
    def captures(self, config: Mapping[str, Any]) -> Captures:
        """Only nested ids; for DeepSeek's and Kimi's targets inputs, unless the first is 1."""
        dflash, listed = object_at(config, DFLASH_SECTION), object_at(config, SECTION).get(KEY)
        ids = layer_ids({**config, **dflash}.get(DFLASH_KEY), plus=1)  # `dflash_utils.py:647`
        if ids is not None:
            return ids
        if listed == []:  # `llama.py:941`: none, rather than the default
            return ()
        ids = layer_ids(listed)
        as_inputs = config.get("model_type") in DEEPSEEK_TYPES and ids and ids[0] != 1
        return ids if as_inputs else layer_ids(listed, plus=1)

    @override
    def taken(self, declaration: Declaration) -> Declaration | None:
        """`_parse_modelopt_quant_config`: algorithms by name, whatever the form.

        What it finds replaces the nested form in config.json, whose excludes are then not read.
        """
        algorithm = declaration.algorithm or ""
        known = algorithm == "FP8" or "FP4" in algorithm
        if declaration.form == "side file" and not known:
            return None
        if declaration.method is None and known:
            declaration = replace(declaration, method="modelopt")
        if declaration.form != "nested" or not declaration.groups:
            return declaration
        return replace(
            declaration,
            excludes=(),
            exclude_remedy="write quantization_config in ModelOpt's flat form: SGLang reads no"
            " excludes of the nested one",
        )

    @override
    def excludes(self, question: Question, module: Module, layout: str, patterns: Patterns) -> bool:
        """Most methods look up the parts of a fused linear, some whatever its class lists."""
        parts = question.names_of_parts(module)
        match layout:
            case "awq":
                return any(pattern in module.prefix for pattern in patterns)
            case "compressed-tensors":
                parts = parts or (module.prefix,)
                named = module.prefix in patterns
                return named or by_parts(suffix_or_regex, patterns, module, parts)
            case "quark":
                always = module.leaf in (GATE_UP.sglang, MLA_DOWN.sglang)
                parts = module.part_prefixes if always else parts
                return whole_or_parts(exact_or_regex, patterns, module, parts)
            case "fp8":
                return _dotted_parts(module, patterns)
            case "modelopt":
                return _dotted_parts(module, patterns) or any(
                    star_on_parts(each, module.prefix) or _names_latent(each, module)
                    for each in patterns
                )
        raise UnsureError(f"How {self.title} leaves linears out of {layout} was never executed")

    @override
    def layer_names(self, question: Question, layer: int, path: str) -> tuple[str, str]:
        leaf, sglang = path.rpartition(".")[2], question.traits.sglang
        inner = path if leaf == "o_proj" else leaf
        names = {"n": layer, "path": path, "leaf": leaf, "inner": inner}
        name = sglang.layer_name.format(**names)
        return name, name if sglang.quantizes_fc(question) else sglang.layer_prefix.format(**names)

    @override
    def other_modules(self, question: Question) -> Iterator[Module]:
        """It also builds fc for a draft without one, and does not use it: `llama_eagle3.py`.

        The head of a block draft is the target's: `dflash_worker_v2.py:138`.
        """
        traits = question.traits
        for each in traits.extra_linears:
            yield Module(each.name, each.name, (each.name,), "replicated")
        if not traits.drafts_blocks and not question.is_tied:
            yield Module("lm_head", "lm_head", ("lm_head",), "column")

    @override
    def plain(self, question: Question) -> frozenset[str]:
        """Plain torch: fc of Llama's drafts (`llama_eagle3.py:163`), DFlash's (`dflash.py:772`).

        Also convolutions, linears outside layers (`dflash.py:564,1184`), and a head that gets no
        quantization config; the head of a block draft is the target's.
        """
        traits = question.traits
        head_too = not traits.drafts_blocks and question.method in QUANTIZED_HEADS
        leaves = {"kernel_projection"} if head_too else {"kernel_projection", "lm_head"}
        if not traits.sglang.quantizes_fc(question):
            leaves |= {each.leaf for each in traits.extra_linears}
            leaves |= {"fc"} if traits.sglang.plain_fc else set()
        return frozenset(leaves)

    @override
    def cache_scale(self, question: Question, tensor: TensorInfo) -> bool | None:
        """Source: `RadixAttention`; executed (`experiments/engines/cache_scales.json`)."""
        if not built.is_cache_scale(tensor):
            return None
        served, name = question.own.mtp, declared_architecture(question.config)
        if served is not None:  # some loaders look it up without checking that it exists
            return served.cache_scales and _has_scales(question)
        whole = question.traits.whole_model or name == _RENAMING
        return _has_scales(question) and not (question.is_latent or whole)


def _dotted_parts(module: Module, patterns: Patterns) -> bool:
    fused = module.leaf in (QKV.sglang, GATE_UP.sglang)
    parts = module.part_prefixes if fused else (module.prefix,)
    return by_parts(dotted_path, patterns, module, parts)


def _names_latent(pattern: str, module: Module) -> bool:
    """ModelOpt's excludes name the parts of MLA, which are looked for in the fused name."""
    return (tail := pattern.rpartition(".")[2]) in _LATENT and tail in module.leaf


def _has_scales(question: Question) -> bool:
    """Whether the attention of a draft has scales that a tensor can fill."""
    method, scheme = question.method, question.keys.get("kv_cache_scheme")
    if method == "compressed-tensors":  # `CompressedTensorsKVCacheMethod.is_supported_scheme`
        return isinstance(scheme, Mapping) and scheme.get("strategy") == "tensor"
    if method == "modelopt" and question.declaration and question.declaration.form == "nested":
        return False  # `_parse_modelopt_quant_config` does not change its algorithm
    if method == "modelopt":
        return isinstance(scheme, Mapping) or bool(question.keys.get("kv_cache_quant_algo"))
    return method in ("fp8", "quark")
