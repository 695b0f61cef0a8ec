"""The known versions of engines: rows of versions.toml with the rules in the engines' modules.

A later version is `replace(THAT, version=..., evidence=..., declaration=replace(THAT.declaration,
...))` with the rules that changed; where it treats a family differently, its `own` gives the traits
with that fact replaced. The traits of families describe the oldest version here.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..drafts.architectures import declared_architecture
from ..drafts.engine_traits import EngineTraits, Finding, InEngine
from . import sglang_config, sglang_linears, vllm_config, vllm_linears
from .config_rules import sglang_captures, vllm_captures
from .contract import ENGINE_NAMES, EngineName, Question
from .engine import ConfigRules, DeclarationRules, Engine, LinearRules, Serving, TensorRules, flag
from .engine_rows import schemes_of, version_row

_UNQUANT = "--speculative-draft-model-quantization unquant"
_USE = "use FP8 in layout modelopt: recipe blackwell-fp8, or NVFP4: blackwell-nvfp4"


def _vllm_launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """What is the draft's stands in `--speculative-config`.

    Without `draft_tensor_parallel_size` the draft is split as the target is. Of another number than
    the target's only 1 is taken (`config/speculative.py:1849`), and then only DSpark's and a
    language model's loaders look at it.
    """
    config = {
        "method": question.own.served_as,
        **({"model": serving.draft} if serving.draft is not None else {}),
        "num_speculative_tokens": num_draft_tokens,
        **({"parallel_drafting": True} if question.is_parallel else {}),
        **({"draft_tensor_parallel_size": question.tp} if question.tp > 1 else {}),
        **({"kv_cache_dtype": serving.cache_dtype} if serving.cache_dtype else {}),
    }
    return serving.line(
        f"vllm serve {shlex.quote(serving.target)} --tensor-parallel-size {question.tp}",
        flag("--quantization", serving.quantization),
        flag("--dtype", serving.dtype),
        flag("--kv-cache-dtype", serving.target_cache_dtype),
        flag("--max-model-len", serving.context),
        f"--speculative-config {shlex.quote(json.dumps(config))}",
    )


def _sglang_launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """The value unquant keeps the draft from inheriting the target's method.

    What the draft itself declares then decides (`_verify_quantization`): the target's would take
    its place where both are called compatible, and would quantize a BF16 draft while loading.
    """
    tokens, blocks = num_draft_tokens, question.traits.drafts_blocks
    steps = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1"
    counted = not blocks or question.traits.sglang.counts_anchor
    float16 = sglang_linears.is_float16_only(question)

    def spelled(cache_dtype: str | None) -> str | None:
        """Plain "fp8", as vLLM says for E4M3, is no choice of SGLang's."""
        return f"{cache_dtype}_e4m3" if cache_dtype == "fp8" else cache_dtype

    return serving.line(
        f"python -m sglang.launch_server --model-path {shlex.quote(serving.target)}"
        f" --tp-size {question.tp}",
        flag("--quantization", serving.quantization),
        flag("--kv-cache-dtype", spelled(serving.target_cache_dtype)),
        f"--speculative-algorithm {question.own.served_as}",
        flag("--speculative-draft-model-path", serving.draft),
        "" if blocks else steps,
        flag("--speculative-num-draft-tokens", tokens + 1 if counted else None),
        _UNQUANT,
        flag("--speculative-draft-kv-cache-dtype", spelled(serving.cache_dtype)),
        flag("--dtype", "float16" if float16 else serving.dtype),
        flag("--context-length", serving.context),
    )


def _tensorrt_llm_launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """JSON is YAML. The draft is split as the target is."""
    config = {
        "decoding_type": question.own.served_as,
        "max_draft_len": num_draft_tokens,
        **({"speculative_model": serving.draft} if serving.draft is not None else {}),
    }
    return serving.line(
        f"echo {shlex.quote(json.dumps({'speculative_config': config}))} > draft.yaml &&",
        f"trtllm-serve {shlex.quote(serving.target)} --tp_size {question.tp}",
        flag("--max_seq_len", serving.context),
        "--config draft.yaml",
    )


def _tensorrt_llm_problem(question: Question) -> Finding:
    """All that is known of a draft: what its declaration is read as."""
    declared = question.declaration
    if declared is None:
        text = "Loading in TensorRT-LLM was never executed, and its source was read in part only"
        return Finding("unknown", text, "try it")
    if question.has_side_file and declared.method != "modelopt":
        text = "TensorRT-LLM reads hf_quant_config.json first, and this folder has one"
        return Finding("unknown", text, "remove hf_quant_config.json")
    row = schemes_of("tensorrt-llm").get(question.signature, {}).get("*")
    if row is None:
        how = f"the quant_method {declared.method} in this form"
        return Finding("unknown", f"What TensorRT-LLM makes of {how} was not read", _USE)
    if row.problem is not None:
        return row.problem
    if row.name != "none":
        text = (
            f"TensorRT-LLM reads this declaration as {row.name}, and loading such a folder was"
            " never executed"
        )
        return Finding("unknown", text, "try it")
    text = f"TensorRT-LLM does not read the quantization_config of {declared.method}"
    if question.traits.tensorrt_llm.read:
        text = f"{text}: it takes the FP8 values as plain numbers without their scales"
        return Finding("wrong", text, _USE)
    return Finding("unknown", f"{text}; how it then loads was read for Llama only", _USE)


def _version(
    name: EngineName,
    own: Callable[[EngineTraits], InEngine],
    launch: Callable[[Question, int, Serving], str],
    *,
    linears: LinearRules,
    **rules: Mapping[str, Any],
) -> Engine:
    """A row of versions.toml with the rules for config, declaration and tensors."""
    row = version_row(name)
    declaration = {"schemes": partial(schemes_of, name), **rules["declaration"]}
    return Engine(
        name=name,
        **row["engine"],
        own=own,
        config=ConfigRules(**row["config"], **rules["config"]),
        declaration=DeclarationRules(**row["declaration"], **declaration),
        linears=linears,
        tensors=TensorRules(**row["tensors"], **rules["tensors"]),
        launch=launch,
    )


_VLLM = _version(
    "vllm",
    lambda traits: traits.vllm,
    _vllm_launch,
    config={
        "architecture_problem": vllm_config.architecture_problem,
        "plain": vllm_config.plain_config,
        "problem": vllm_config.config_problem,
        "captures": lambda question: vllm_captures(
            question.config,
            runs_v1=declared_architecture(question.config) not in question.traits.vllm.not_in_v1,
        ),
    },
    declaration={"taken": vllm_config.taken, "exclude_rules": vllm_linears.EXCLUDE_RULES},
    linears=LinearRules(
        modules=vllm_linears.modules,
        plain=vllm_linears.plain,
        plain_remedy=vllm_linears.plain_remedy,
        biases=vllm_config.biases,
    ),
    tensors={"cache_scale": vllm_linears.cache_scale, "cut_head": vllm_config.cut_head},
)
_SGLANG = _version(
    "sglang",
    lambda traits: traits.sglang,
    _sglang_launch,
    config={
        "architecture_problem": sglang_config.architecture_problem,
        "plain": sglang_config.plain_config,
        "problem": sglang_linears.config_problem,
        "captures": lambda question: sglang_captures(question.config),
    },
    declaration={"taken": sglang_config.taken, "exclude_rules": sglang_linears.EXCLUDE_RULES},
    linears=LinearRules(
        modules=sglang_linears.modules,
        plain=sglang_linears.plain,
        stored=sglang_linears.codes_in_floats,
        biases=sglang_config.biases,
    ),
    tensors={
        "cache_scale": sglang_linears.cache_scale,
        "stranger": sglang_linears.stranger,
        "unshared_head": sglang_config.unshared_head,
        "cut_head": sglang_config.cut_head,
    },
)
_TENSORRT_LLM = _version(
    "tensorrt-llm",
    lambda traits: traits.tensorrt_llm,
    _tensorrt_llm_launch,
    config={"problem": _tensorrt_llm_problem},
    declaration={
        "schemes": lambda: {  # what is refused is `_tensorrt_llm_problem`'s
            signature: {"*": row["*"]._replace(problem=None)}
            for signature, row in schemes_of("tensorrt-llm").items()
        },
        "exclude_rules": {},
    },
    linears=LinearRules(  # which linears it builds was not read
        modules=lambda _question: (),
        plain=lambda _question: frozenset(),
    ),
    tensors={},
)
ENGINES: Mapping[tuple[EngineName, str], Engine] = {
    (engine.name, engine.version): engine for engine in (_VLLM, _SGLANG, _TENSORRT_LLM)
}
"""By name and version; older versions of an engine first."""


def known_versions(name: EngineName) -> tuple[Engine, ...]:
    """Those of one engine, the newest last."""
    return tuple(engine for engine in ENGINES.values() if engine.name == name)


def choose(name: EngineName, version: str | None = None) -> Engine:
    """One version of an engine; the newest for None, and for one that is not known."""
    return ENGINES.get((name, version or ""), known_versions(name)[-1])


def newest_engines() -> tuple[Engine, ...]:
    """The newest known version of every engine."""
    return tuple(choose(name) for name in ENGINE_NAMES)
