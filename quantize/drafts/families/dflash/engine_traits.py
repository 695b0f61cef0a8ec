"""DFlash in engines, and how vLLM reads its config.json of speculators."""

from collections.abc import Mapping
from typing import Any

from ...engine_traits import (
    ATTENTION,
    NO_BIAS,
    EngineTraits,
    Finding,
    Fusion,
    InSglang,
    InTensorRtLlm,
    InVllm,
    Speculators,
    dropped_roots,
    refused_roots,
)

BLOCK = 8
"""Tokens of a block where nothing says how many: vLLM asks the command that serves the draft."""


def of_speculators(
    config: Mapping[str, Any], _layers: Mapping[str, Any]
) -> dict[str, Any] | Finding:
    """The keys of an ordinary config.json."""
    ids = block_ids(config, "aux_hidden_state_layer_ids", "mask_token_id")
    if isinstance(ids, Finding):
        return ids
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": ids,
            "causal": not config.get("sliding_window_non_causal", True),
        },
        "block_size": config.get("block_size") or BLOCK,
    }


def block_ids(config: Mapping[str, Any], *needed: str) -> list[int] | Finding:
    """The target's layers, counted after them; or the error where a key is missing or wrong."""
    for key in needed:
        if key not in config:
            return Finding("config", f"KeyError: {key!r}", f"add {key!r}, as it was trained")
    ids = config["aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        text = f"TypeError: '{type(ids).__name__}' object is no list of layers"
        return Finding("config", text, "correct 'aux_hidden_state_layer_ids'")
    return [i - 1 for i in ids]


ENGINE_TRAITS = EngineTraits(
    drafts_blocks=True,
    prunes_vocabulary=True,
    usual_type="qwen3",
    vllm=InVllm(
        architectures=frozenset({"DFlashDraftModel"}),
        served_as="dflash",
        roots=refused_roots("DFlashQwen3Model", "model", "draft_model", "dflash_module"),
        uneven_heads="AssertionError: vllm/model_executor/models/qwen3_dflash.py:191: assert"
        " self.total_num_heads % tp_size == 0",
        targets_on_disk=frozenset({"modelopt"}),
        biases=lambda _draft: (ATTENTION, NO_BIAS),  # `qwen3_dflash.py`
        fusion=Fusion(counted_by=(), null_width=""),  # `qwen3_dflash.py:84`
        head_declared="asked",  # `qwen3_dflash.py:755`
        speculators={"dflash": Speculators(of_speculators, qwen3=True)},
    ),
    sglang=InSglang(
        architectures=frozenset({"DFlashDraftModel"}),
        served_as="DFLASH",
        roots={"model.": None, **dropped_roots("draft_model.", "dflash_module.")},
        shares_tables=True,
        uneven_heads="AssertionError: DFlashAttention requires total_num_heads divisible by"
        " tp_size. total_num_heads={heads}, tp_size={tp}.",
        biases=lambda _draft: (ATTENTION, NO_BIAS),
        layer_name="layers.{n}.{path}",
        layer_prefix="{leaf}",
        fusion=Fusion(counted_by=(), reads_width=False),  # `dflash.py:762`
    ),
    tensorrt_llm=InTensorRtLlm(architectures=frozenset({"DFlashDraftModel"}), served_as="DFlash"),
)
