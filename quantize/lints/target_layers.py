"""Which target layers engines capture, and what they make of the draft's own layers."""

from collections.abc import Iterator

from ..drafts import Draft
from ..drafts.exporters import in_speculators_layout, is_mla, layer_config
from ..drafts.lint import Lint
from ..drafts.recognition import layers_of_one
from ..drafts.shared.aux_layers import (
    DEEPSEEK_TYPES,
    KEY,
    SECTION,
    AuxLayerIds,
    Spelling,
    layers_in_both_places,
    read_aux_layer_ids,
)
from ..drafts.shared.eagle3.lints import eagle3
from ..drafts.speculators_layout import LAYER_CONFIG
from ..files.checkpoint import CONFIG_FILE

_NESTED = f"{SECTION}.{KEY}"
_COUNT, _WIDTH = "num_aux_hidden_states", "target_hidden_size"
_READ_BY: dict[Spelling, str] = {
    "nested": f"stand in {SECTION} only: vLLM 0.33 takes them as inputs of layers (one layer too"
    " early) or, in its V2 runner, ignores them",
    "nested-inputs": f"stand in {SECTION} as inputs of layers (TorchSpec's export for vLLM): other"
    " readers take them for layers themselves, and vLLM's V2 runner ignores them",
    "top": "stand at the top level only: SGLang 0.5.23 captures its default layers, and both"
    f" engines size fc by the list in {SECTION} (3 layers without one)",
    "equal": f"are the same at the top level and in {SECTION}: SGLang 0.5.23 adds one to the"
    " latter",
    "portable": f"stand in {SECTION} as 'after layer': SGLang 0.5.23 reads them so for DeepSeek"
    " and Kimi targets only where the first is 1",
}


def aux_layer_ids(draft: Draft) -> Iterator[Lint]:
    """Ids that an engine misses or misreads; a default needs none.

    Source: `aux_layers.py`.
    """
    found, config = _spelled(draft), draft.checkpoint.config
    if found is None or found.after is None:
        return
    inputs, nested = layers_in_both_places(found.after, config)
    if found.spelling == ("equal" if nested == inputs else "portable"):
        return
    spelled = {KEY: config.get(KEY), _NESTED: (config.get(SECTION) or {}).get(KEY)}
    yield Lint(
        name="aux-layer-ids",
        level="warning",
        cause=f"the ids of the target layers {_READ_BY[found.spelling]}",
        remedy=f"write {inputs} at the top level and {nested} in {SECTION}; both engines"
        f" then capture the outputs of layers {list(found.after)}",
        fix={k: ids for k, ids in {KEY: inputs, _NESTED: nested}.items() if ids != spelled[k]},
    )


def aux_layer_list(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `llama.py:929-941` takes its default for null only; vLLM for both."""
    geometry, section = eagle3(draft), draft.checkpoint.config.get(SECTION) or {}
    if geometry is not None and geometry.fuses and section.get(KEY) == []:
        yield Lint(
            name="aux-layer-ids-empty",
            level="warning",
            cause=f"{_NESTED} is [], which means the default layers in ModelOpt: vLLM 0.33"
            " captures these, but SGLang 0.5.23 captures none",
            remedy="write null: both engines then capture their default layers",
            fix={_NESTED: None},
        )


def layers_of_fc(draft: Draft) -> Iterator[Lint]:
    """Keys by which engines size fc otherwise than it is. Source: `Fusion` of `engine_traits`."""
    geometry, config = eagle3(draft), draft.checkpoint.config
    if geometry is None or not geometry.fuses:
        return
    count, traits = geometry.num_aux_layers, draft.family.engine_traits
    spelled, speculators = layer_config(draft), in_speculators_layout(draft)
    ids = list(geometry.aux_layer_ids or ()) or None
    as_fixed = {**spelled, KEY: ids}  # by `aux_layer_ids`, which knows no speculators
    if not speculators:
        as_fixed[SECTION] = {**(config.get(SECTION) or {}), KEY: ids}
    normed = traits.vllm.normed_fusion if getattr(geometry, "qk_norm", False) else None
    fusions = {"vLLM 0.33": normed or traits.vllm.fusion}
    if not speculators:
        fusions["SGLang 0.5.23"] = traits.sglang.fusion
    wrong = [who for who, how in fusions.items() if how and how.num_layers(as_fixed) != count]
    if wrong:
        numbers = [key for key in ("num_aux_layers", _COUNT) if spelled.get(key) is not None]
        place = f"{LAYER_CONFIG}." if speculators else ""
        yield Lint(
            name="aux-layer-count",
            level="warning",
            cause=f"the draft reads {count} layers of the target, and {' and '.join(wrong)} size"
            f" fc by {' and '.join(numbers or [_COUNT])}, or else for 3: they refuse the draft",
            remedy=f"write {count} there",
            fix={f"{place}{key}": count for key in numbers or [_COUNT]},
        )
    if not speculators and config.get(_WIDTH, 0) is None:
        yield Lint(
            name="target-hidden-size-null",
            level="warning",
            cause="target_hidden_size is null, with which vLLM 0.33, and SGLang 0.5.23 for Llama"
            " layers, compute the width of fc: they end with a TypeError",
            remedy="write the width, or remove the key",
            fix={_WIDTH: geometry.target_hidden_size},
        )


def layers_of_target(draft: Draft) -> Iterator[Lint]:
    """Source: `llama_eagle3.py:206` of vLLM 0.33, `:202` of SGLang 0.5.23; executed."""
    said = layer_config(draft).get("num_hidden_layers")
    if not draft.family.one_layer or said == draft.geometry.num_layers:
        return
    fix = {} if in_speculators_layout(draft) else layers_of_one(draft.checkpoint.config)
    yield Lint(
        name="layers-of-target",
        level="warning",
        cause=f"num_hidden_layers is {said}, as in the target, but the tensors are those"
        " of one layer: vLLM 0.33 and SGLang 0.5.23 also build the other layers, and"
        " serve them uninitialized",
        remedy="write num_hidden_layers: 1",
        fix=fix,
    )


def without_fc(draft: Draft) -> Iterator[Lint]:
    """Source: `reads_aux_layers`."""
    geometry = eagle3(draft)
    if geometry is not None and not geometry.fuses:
        yield Lint(
            name="last-hidden-state",
            level="note",
            cause="use_aux_hidden_state is false, so the draft has no fc, and reads the"
            " target's last hidden state behind the final norm; dumps of hidden states"
            " hold the outputs of layers instead",
            remedy="record its traces with draftquant record --draft DRAFT --fused",
        )


def aux_layer_zero(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `deepseek_v2.py`: [0, ...] stays as it is, [1, ...] gets one added."""
    found = _spelled(draft)
    if found and found.after and found.after[0] == 0 and _for_deepseek(draft):
        yield Lint(
            name="aux-layer-zero",
            level="warning",
            cause="the draft reads the output of layer 0, which SGLang 0.5.23 cannot capture"
            " for DeepSeek and Kimi targets",
            remedy="serve this draft with vLLM",
        )


def _spelled(draft: Draft) -> AuxLayerIds | None:
    """How config.json spells the layers; None where engines read them from elsewhere."""
    if eagle3(draft) is None or in_speculators_layout(draft):
        return None
    return read_aux_layer_ids(draft.checkpoint.config, draft.checkpoint.folder / CONFIG_FILE)


def _for_deepseek(draft: Draft) -> bool:
    return draft.checkpoint.config.get("model_type") in DEEPSEEK_TYPES


def later_layer_norm(draft: Draft) -> Iterator[Lint]:
    """Layers after the first have one norm before attention, under two names.

    Source: loaded in vLLM 0.33 and SGLang 0.5.23 (Llama): each leaves its own name at ones.
    """
    if eagle3(draft) is None:
        return
    for row in draft.rows:
        _, _, rest = row.canonical.partition("layers.")
        if rest.startswith("0.") or not rest.endswith(".input_layernorm.weight"):
            continue
        sglang = row.tensor.name.endswith(".hidden_norm.weight")
        if is_mla(draft) and not sglang:  # SGLang refuses these layers anyway
            return
        here, there = ("SGLang", "vLLM") if sglang else ("vLLM", "SGLang")
        other = "input_layernorm" if sglang else "hidden_norm"
        yield Lint(
            name="later-layer-norm",
            level="warning",
            cause=f"only {here} reads the name {row.tensor.name}; {there} looks for {other},"
            " and silently serves a norm of ones",
            remedy=f"serve this draft with {here}, or rename the tensors for {there}",
        )
        return


def layers_of_mla(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `kimi_k25_eagle3.py` `Eagle3MLAModel`."""
    geometry = eagle3(draft)
    if geometry is not None and is_mla(draft) and geometry.num_layers > 1:
        yield Lint(
            name="mla-layers",
            level="warning",
            cause=f"the draft has {geometry.num_layers} layers with MLA, and SGLang 0.5.23"
            " refuses more than one",
            remedy="serve this draft with vLLM",
        )
