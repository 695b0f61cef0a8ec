"""Domino in engines: SGLang serves it as DFlash, vLLM has nothing like it."""

from dataclasses import replace

from ...engine_traits import Finding, ServedDraft
from ..dflash import engine_traits as dflash


def _in_vllm(_draft: ServedDraft) -> Finding | None:
    return Finding(
        "load",
        "ValueError: There is no module or parameter named 'embed_proj' in DFlashQwen3Model.",
        "serve it with SGLang: vLLM has nothing like Domino",
    )


def _in_sglang(draft: ServedDraft) -> Finding | None:
    """`parse_dflash_draft_config`, `dflash_utils.py:779`; no trainer writes the key at the top."""
    length = (draft.config.get("dflash_config") or {}).get("pure_draft_prefix_len")
    if length == 1:
        return None
    return Finding(
        "init",
        f"ValueError: DFLASH Domino currently requires pure_draft_prefix_len=1, got {length!r}.",
        "train the draft with pure_draft_prefix_len 1",
    )


_DFLASH = dflash.ENGINE_TRAITS
ENGINE_TRAITS = replace(
    _DFLASH,
    prunes_vocabulary=False,
    module_names=("prefix_gru", "embed_proj"),
    vllm=replace(
        _DFLASH.vllm,
        refused_names={
            "DominoDraftModel": "serve it with SGLang, as DFlashDraftModel: vLLM has nothing like"
            " Domino"
        },
        problem=_in_vllm,
        speculators={},
    ),
    sglang=replace(
        _DFLASH.sglang,
        refused_names={"DominoDraftModel": "set architectures to DFlashDraftModel"},
        problem_as_draft=_in_sglang,
    ),
)
