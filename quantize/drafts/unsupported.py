"""Drafts of kinds that no family reads yet: told apart, so that the refusal names them.

Kimi-Linear's config.json says `num_nextn_predict_layers` 0, which vLLM 0.33 and SGLang 0.5.23 take
for its default (`configs/kimi_linear.py:49`, `:55`); no class of theirs serves such a layer. Of
MiMo-V2's three layers vLLM serves the first alone, fed with its own output (`mimo_v2_mtp.py:37`),
SGLang all, each fed with the target's state (`multi_layer_eagle_worker_v2.py:196`).

Names are those of `models/registry.py` of vLLM 0.33.0, `EntryClass` of SGLang 0.5.23 and the
trainers; what no name tells, tensors do.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..files.safetensors_header import TensorInfo

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
    (r"^\d+\.\d+\.linear\.", "Medusa heads under another name than MedusaModel"),
    (r"\b(eh_proj|enorm)\b|^mtp\.", "an MTP layer"),
    (r"(^|\.)fc\.weight$", "an EAGLE draft under an unknown name"),
    (r"^model\.layers\.\d+\.", "a whole language model"),
)
"""Part of a tensor's name -> the kind; the first that fits."""


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


def old_medusa_keys(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> str | None:
    """What FasterDecoding's config.json of Medusa heads lacks: the name, and every size.

    It has `medusa_num_heads` (2 beside the five heads of their releases), `medusa_num_layers`
    and the name of the target: an engine takes the sizes from that.

    Returns:
        What to add, by the tensors; None for anything else.
    """
    blocks = {t.name: t for t in tensors if _OLD_MEDUSA.search(t.name)}
    heads = [t for t in blocks.values() if ".linear." not in t.name and len(t.shape) == 2]
    if "medusa_num_heads" not in config or not heads:
        return None
    squares = [name for name in blocks if name.endswith(".linear.weight")]
    vocab, hidden = heads[0].shape
    return (
        f'add "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": {hidden},'
        f' "vocab_size": {vocab}, "medusa_num_heads": {len(heads)},'
        f' "medusa_num_layers": {len(squares) // len(heads)},'
        f' "medusa_fc_bias": {"true" if any(n.endswith(".bias") for n in blocks) else "false"}'
    )


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


_OLD_MEDUSA = re.compile(r"(^|medusa_heads?\.)\d+\.\d+\.(linear\.(weight|bias)|weight)$")
