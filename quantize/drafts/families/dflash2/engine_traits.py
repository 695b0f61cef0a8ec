"""DFlash2 in engines: convolutions in its layers, and a selector that no engine quantizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...engine_traits import ExtraLinear, Finding, Speculators, refused_roots
from ..dflash import engine_traits as dflash

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _of_speculators(
    config: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any] | Finding:
    plain = dflash.of_speculators(config, layers)
    if isinstance(plain, Finding):
        return plain
    absent = next((key for key in _KEYS if config.get(key) is None), None)
    if absent is not None:
        return Finding("init", f"KeyError: {absent!r}", f"add {absent!r}, as it was trained")
    own = {key: config[key] for key in _KEYS}
    return {
        **plain,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**plain["dflash_config"], **own},
    }


_DFLASH = dflash.ENGINE_TRAITS
ENGINE_TRAITS = replace(
    _DFLASH,
    prunes_vocabulary=False,
    convolutions=("attention_conv", "mlp_conv"),
    # vLLM 0.33 `qwen3_dflash2.py:316`, SGLang `dflash.py`.
    extra_linears=(ExtraLinear("candidate_selector.hidden_projection"),),
    module_names=("candidate_selector",),
    vllm=replace(
        _DFLASH.vllm,
        architectures=frozenset({"DFlash2DraftModel"}),
        roots=refused_roots("DFlash2Qwen3Model", "draft_model", "dflash_module"),
        speculators={"dflash2": Speculators(_of_speculators, qwen3=True)},
    ),
    sglang=replace(_DFLASH.sglang, architectures=frozenset({"DFlash2DraftModel"})),
    tensorrt_llm=replace(_DFLASH.tensorrt_llm, architectures=frozenset()),
)
