"""DFlash and its kin: who may look at whom within a block, and what engines do otherwise."""

from collections.abc import Iterator

from ...exporters import in_speculators_layout, layer_config
from ...family import Draft, Lint


def block_size(draft: Draft) -> Iterator[Lint]:
    """Source: `DEFAULT_BLOCK_SIZE`."""
    config = draft.checkpoint.config
    nested = config.get("dflash_config") or {}
    if config.get("block_size") is None and nested.get("block_size") is None:
        yield Lint(
            name="dflash-block-size-missing",
            level="warning",
            cause="config.json has no block_size, so the block size of training is unknown:"
            " SGLang 0.5.23 drafts blocks of 16 tokens, and vLLM 0.33 as many tokens as"
            " its own configuration asks for",
            remedy="add the block_size that the draft was trained with",
        )


def causality(draft: Draft) -> Iterator[Lint]:
    """Trained with one mask, served with another.

    Source: vLLM 0.33 `_dflash_layer_causal`, `speculators/algos.py` `update_dflash`; SGLang 0.5.23
    `dflash.py` `_get_dflash_layer_attention_params`; z-lab/dflash @44947fb (never causal).
    """
    if in_speculators_layout(draft):
        yield from _speculators_causality(draft)
        return
    config = draft.checkpoint.config
    if config.get("is_causal") is not None:  # both engines read it before anything else
        return
    sliding = _sliding(draft)
    causal = (config.get("dflash_config") or {}).get("causal")
    if causal is None and any(sliding):
        yield Lint(
            name="dflash-sliding",
            level="warning",
            cause="the draft has sliding layers, but config.json has no is_causal: engines"
            " serve these layers as causal, while z-lab's training code lets every slot"
            " of a block attend to all others",
            remedy="add the is_causal that the draft was trained with",
        )
    elif causal is not None and any(causal != layer for layer in sliding):
        yield Lint(
            name="dflash-causal",
            level="warning",
            cause=f"dflash_config.causal is {str(causal).lower()}: vLLM 0.33 reads it, but"
            " SGLang 0.5.23 reads only is_causal, and only where layer_types is present",
            remedy=f"add is_causal {str(causal).lower()} and layer_types",
            fix={"is_causal": causal, "layer_types": _layer_types(draft)},
        )


def _speculators_causality(draft: Draft) -> Iterator[Lint]:
    if draft.checkpoint.config.get("sliding_window_non_causal", True):
        return
    yield Lint(
        name="dflash-speculators-causal",
        level="warning",
        cause="sliding_window_non_causal is false: vLLM 0.33 then serves every layer as"
        " causal, but speculators trains full layers as bidirectional",
        remedy="measure acceptance with each value: neither serves both kinds of layers as"
        " they were trained"
        if any(_sliding(draft))
        else "write sliding_window_non_causal true in the source, because the draft has"
        " no sliding layers",
    )


def _layer_types(draft: Draft) -> list[str]:
    types = layer_config(draft).get("layer_types")
    return list(types) if types else ["full_attention"] * draft.geometry.num_layers


def _sliding(draft: Draft) -> list[bool]:
    return [kind == "sliding_attention" for kind in _layer_types(draft)]


LINTS = (block_size, causality)
