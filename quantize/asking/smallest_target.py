"""config.json of a target beside which an engine builds a draft: the user's, or a smallest one."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...recipes.errors import CheckpointError
from ..drafts.config_reader import with_text_config
from ..files.checkpoint import CONFIG_FILE
from ..pairing.features import misfits
from ..pairing.target import Target
from ..stored.stored_draft import StoredDraft
from .given_folder import without_code

_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SHARED = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta")
_NOT_OF_TARGETS = ("quantization_config", "compression_config")
_LEAST_LAYERS = 8


def write_target(
    folder: Path, draft: StoredDraft, target: Path | None, num_layers: int | None
) -> tuple[str, ...]:
    """Write config.json into the empty folder, without what it names of code, which is returned.

    CheckpointError: the given target has not the width, vocabulary or layers that the draft reads.
    """
    if target is None:
        config = _smallest(draft, num_layers)
    else:
        read = Target.read(target)
        sizes = read.num_layers, read.vocab_size, read.hidden_size
        for _, misfit in misfits(draft.draft.geometry, *sizes):
            raise CheckpointError(target, misfit, fix="give the target of this draft")
        config = dict(read.config)
    given = without_code(config)
    (folder / CONFIG_FILE).write_text(json.dumps(given), encoding="utf-8")
    named = target is not None and given != config
    return ("auto_map of the target's config.json",) if named else ()


def _smallest(draft: StoredDraft, num_layers: int | None) -> dict[str, Any]:
    """A Llama's, or DeepSeek-V3's for MLA; whole models and MTP layers have a target's own."""
    config, family = with_text_config(draft.checkpoint.config), draft.draft.family
    geometry = draft.draft.geometry
    if family.engine_traits.vllm.mtp is not None or not geometry.reads_features:
        return {key: value for key, value in config.items() if key not in _NOT_OF_TARGETS}
    hidden = geometry.target_hidden_size
    heads = max(1, hidden // 64)
    layers = max(_LEAST_LAYERS, 2 + max(_layer_ids(config), default=0), num_layers or 0)
    common = {key: config[key] for key in _SHARED if config.get(key) is not None}
    common |= {
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if config.get("kv_lora_rank") is None:
        named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**common, **named, "head_dim": hidden // heads}
    latent = {key: config.get(key) for key in _LATENT}
    named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**common, **latent, **named, "head_dim": config.get("qk_rope_head_dim"),
            "n_routed_experts": 8}  # fmt: skip


def _layer_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Layers of the target that any key names."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_ids(value)
        elif key.endswith("layer_ids") and isinstance(value, list):
            yield from (each for each in value if type(each) is int)
