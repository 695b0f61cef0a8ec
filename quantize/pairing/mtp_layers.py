"""The MTP layers of a quantized target: dropped by its quantizer, or mixed with its scheme.

Sources: `engines/mtp.py`; vLLM 0.33 gives most MTP layers the target's quantization
(`deepseek_mtp.py:83`, `mimo_mtp.py:111`, `glm4_moe_mtp.py:144`), SGLang 0.5.23 reads the config of
the folder that the layer comes from.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..engines.exclude_mismatches import misread_excludes
from ..errors import CheckpointError
from .pair import Pair, PairFinding
from .target import Target

_GRAFT = "put the layer back: draftquant graft TARGET LAYER --out O"


def dropped(target: Target) -> str | None:
    """What is missing where config.json promises MTP layers and no shard has one."""
    count = target.promised_mtp_layers
    if not target.names or not count or target.stored_mtp_layers:
        return None
    return (
        f"the target's config.json promises {count} MTP layer{'s' if count > 1 else ''}, and its"
        " shards have none: whoever quantized it dropped them"
    )


def missing_layers(pair: Pair) -> Iterator[PairFinding]:
    """Worth a note for a draft with a folder of its own."""
    text = dropped(pair.target)
    if text is not None:
        yield PairFinding("note", "mtp", f"{text}; this draft does not need them", _GRAFT)


def mixed_layer(pair: Pair) -> Iterator[PairFinding]:
    """Linears of an MTP layer in a folder of its own, which vLLM builds as the target declares.

    Of one inside its target the answer for the draft alone says it already.
    """
    if not pair.is_mtp or pair.is_inside or pair.target.declaration is None:
        return
    declared = {**pair.draft.config, "quantization_config": dict(pair.target.declaration)}
    beside = replace(pair.draft, config=declared)
    try:
        found = misread_excludes(beside, target_layers=pair.target.num_layers)
    except CheckpointError:
        return
    if "vllm" in found:
        yield PairFinding(
            "wrong",
            "mtp",
            "the target's quantization_config does not say how its MTP layer is stored:"
            f" {found['vllm']}. It ends with an error, or serves weights that were never loaded",
            "correct the excludes of the target's quantization_config, or take the layer of the"
            " BF16 original: draftquant graft TARGET LAYER --out O",
            "vllm",
        )
