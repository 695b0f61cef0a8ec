"""What tells where a draft comes from and which maths engines will run for it."""

from collections.abc import Mapping
from typing import Any

from ..drafts import Draft
from ..drafts.config_reader import with_text_config
from ..drafts.families.medusa.geometry import MedusaGeometry
from ..drafts.shared.eagle3.geometry import Eagle3Geometry
from ..drafts.shared.llama.geometry import LlamaGeometry
from ..drafts.shared.mtp.geometry import MtpGeometry
from ..drafts.speculators import LAYER_CONFIG, is_speculators

_MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")


def eagle3(draft: Draft) -> Eagle3Geometry | None:
    """The geometry of an EAGLE-3 draft, None for drafts of other kinds."""
    return draft.geometry if isinstance(draft.geometry, Eagle3Geometry) else None


def is_mtp(draft: Draft) -> bool:
    """True for a target's MTP layer, whose names and config are its target's."""
    return isinstance(draft.geometry, MtpGeometry)


def is_medusa(draft: Draft) -> bool:
    """True for Medusa heads."""
    return isinstance(draft.geometry, MedusaGeometry)


def is_mla(draft: Draft) -> bool:
    """True for latent attention."""
    return draft.checkpoint.config.get("kv_lora_rank") is not None


def is_whole(draft: Draft) -> bool:
    """True for a language model, which shares nothing with the target."""
    return isinstance(draft.geometry, LlamaGeometry) and not draft.geometry.reads_features


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
