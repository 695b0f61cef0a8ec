"""Drafts of kinds that no family reads: told apart, so that the refusal names them.

Kimi-Linear's config.json says `num_nextn_predict_layers` 0, which vLLM 0.33 and SGLang 0.5.23 take
for its default (`configs/kimi_linear.py:49`, `:55`); no class of theirs serves such a layer. Of
MiMo-V2's three layers vLLM serves the first alone, fed with its own output (`mimo_v2_mtp.py:37`),
SGLang all, each fed with the target's state (`multi_layer_eagle_worker_v2.py:196`).

Names are those of `models/registry.py` of vLLM 0.33.0, `EntryClass` of SGLang 0.5.23 and the
trainers; what no name tells, tensors do.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import CheckpointError
from .architectures import declared_architecture, projector_type

_BY_NAME = (
    (r"P-?Eagle", "P-EAGLE"),
    (r"(Lfm2|K3|Gemma4|MuseSpark)DSpark|DSpark(MiniMax|V41)", "DSpark with another body"),
    (r"DSpark", "DSpark"),
    (r"DFlash2Beam", "DFlash2 with layers of Beam"),
    (r"LiLiCorr", "LiLiCorr"),
    (r"XPress", "XPress"),
    (r"MuseGlimmer", "Muse Glimmer's DFlash"),
    (r"Laguna", "Laguna's DFlash"),
    (r"DFlare", "DFlare"),
    (r"Medusa", "a target with Medusa heads"),
    (r"MiMoV2", "an MTP layer of MiMo-V2"),
    (r"KimiK3", "an MTP layer of Kimi-K3"),
    (r"KimiLinear", "Kimi-Linear, which was published without an MTP layer"),
    (r"NextN|MTP", "an MTP layer"),
    (r"Eagle3", "EAGLE-3 with layers of another kind"),
    (r"Eagle", "EAGLE-1 with layers of another kind"),
    (r"Assistant", "Gemma's assistant"),
)
"""Part of an architecture, in any case -> the kind; the first that fits."""
_BY_TENSORS = (
    (r"markov_", "DSpark"),
    (r"mask_hidden", "P-EAGLE"),
    (r"(^|.)medusa", "a target with Medusa heads"),
    (r"^\d+\.\d+\.linear\.", "Medusa heads"),
    (r"\b(eh_proj|enorm)\b|^mtp\.", "an MTP layer"),
    (r"(^|\.)fc\.weight$", "an EAGLE draft under an unknown name"),
    (r"^model\.layers\.\d+\.", "a whole language model"),
)
"""Part of a tensor's name -> the kind; the first that fits."""


_EAGLE1 = (
    "EagleLlamaForCausalLM",
    "EagleQwen2ForCausalLM",
    "LlamaForCausalLMEagle",
    "Qwen2ForCausalLMEagle",
    "EagleSpeculator",
)
_NAMED_AS_TARGET = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""What EAGLE-1 heads call themselves too; of other drafts of these names none has an fc alone."""
_FC = re.compile(r"(^|[._])fc\.")
"""Of speculators' `fusion_fc` too, and of codes."""


def refuse_earlier_kinds(
    config: Mapping[str, Any], tensors: Collection[str], where: object
) -> None:
    """Refuse a draft whose maths version 0.2.0 knew, and this one does not.

    Args:
        config: the parsed config.json.
        tensors: names in the folder.
        where: named in errors.

    Raises:
        CheckpointError: it is a Medusa, EAGLE-1 or Domino draft.
    """
    kind = _earlier_kind(config, tensors)
    if kind is not None:
        raise CheckpointError(
            where,
            f"draftquant does not know the maths of {kind} draft; version 0.2.0 quantized it",
            fix="use draftquant 0.2.0 for this draft; docs/families.md lists what this one reads",
        )


def _earlier_kind(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    name = declared_architecture(config)
    if name == "MedusaModel" or (not name and "medusa_num_heads" in config):
        return "a Medusa"
    if name == "DominoDraftModel" or (
        name == "DFlashDraftModel"
        and (
            projector_type(config) == "domino" or any("prefix_gru." in tensor for tensor in tensors)
        )
    ):
        return "a Domino"
    has_fc_alone = any(map(_FC.search, tensors)) and not any(
        tensor.endswith("hidden_norm.weight") for tensor in tensors
    )
    if (
        name in _EAGLE1
        or (name in _NAMED_AS_TARGET and has_fc_alone)
        or config.get("speculators_model_type") == "eagle"
    ):
        return "an EAGLE-1"
    return None


def kind_of(architecture: str, tensors: Collection[str]) -> str | None:
    """What a draft is that no family reads; None where that is not known.

    Args:
        architecture: its name in config.json.
        tensors: their names in the folder.
    """
    for part, kind in _BY_NAME:
        if re.search(part, architecture, re.IGNORECASE):
            return kind
    for part, kind in _BY_TENSORS:
        if any(re.search(part, name) for name in tensors):
            return kind
    return None


def nested_eagle_keys(config: Mapping[str, Any]) -> str | None:
    """What vLLM's own form of EAGLE configs lacks: its draft's keys stand under "model".

    Source: `EAGLEConfig` of vLLM 0.33 writes `{"model_type": "eagle", "model": {...}}` for a draft
    that it has renamed, and reads it again; SGLang 0.5.23 knows no such model_type.
    """
    inner = config.get("model")
    if not isinstance(inner, Mapping) or "hidden_size" not in inner:
        return None
    named = "" if inner.get("architectures") else ', and add "architectures"'
    return f"move the keys of 'model' to the top level of config.json{named}"
