"""Which trainer's exporter wrote a config.json, and where it put the keys of the layers."""

from collections.abc import Mapping
from typing import Any

from .config_reader import with_text_config
from .family import Draft
from .recognition import LAYER_CONFIG, is_speculators

_MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")


def is_mla(draft: Draft) -> bool:
    """True for latent attention."""
    return draft.checkpoint.config.get("kv_lora_rank") is not None


def in_speculators_layout(draft: Draft) -> bool:
    """True for the layout that vLLM translates and SGLang does not know."""
    return is_speculators(draft.checkpoint.config)


def is_torchspec(draft: Draft) -> bool:
    """True if TorchSpec's exporter signed config.json."""
    return "_torchspec_version" in draft.checkpoint.config


def is_modelopt(draft: Draft) -> bool:
    """True if eagle_config has the keys that ModelOpt's export templates alone write."""
    section = draft.checkpoint.config.get("eagle_config")
    return isinstance(section, dict) and any(key in section for key in _MODELOPT_KEYS)


def layer_config(draft: Draft) -> Mapping[str, Any]:
    """Where the keys of the decoder layers stand, nested in the speculators layout and others."""
    config = draft.checkpoint.config
    nested: Mapping[str, Any] = config.get(LAYER_CONFIG) or {}
    return nested if in_speculators_layout(draft) else with_text_config(config)
