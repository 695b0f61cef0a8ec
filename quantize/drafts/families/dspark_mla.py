"""DSpark over layers with multi-head latent attention: the kind of Kimi-K3-DSpark.

Sources: `models/kimi_k3/nvidia/dspark_mla.py`, `mla.py` and `configs/k3_dspark.py` of vLLM 0.33.0,
whose errors these are, executed (`experiments/engines/k3_maths.json`); SGLang 0.5.23 has no such
class. Names and keys are those of the published Inferact/Kimi-K3-DSpark: all keys at the top level,
no block_size (it was trained with 7), no head. vLLM projects the context of all layers with one
linear, the `kv_a_proj_with_mqa` of each below the other, which is declared as the first layer's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from .. import engine_traits as traits
from ..config_reader import ConfigReader, Served
from ..family import Draft, Lint, SpeculatorsForm, TensorSpec, told
from ..shared.layers import with_latent
from . import dspark
from .dspark import DSpark

BLOCK_SIZE = 7
"""Where config.json has none, as in the published draft, which was trained with it."""
_PREFIXES = (("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."))


def _in_vllm(draft: traits.ServedDraft) -> traits.Finding | None:
    """Rules of `K3DSparkConfig`, of `SpeculativeConfig` and the loader."""
    config = draft.config
    for _, canonical in _PREFIXES:
        if any(name.startswith(canonical) for name in draft.tensor_names):
            return traits.Finding(
                "load",
                "ValueError: There is no module or parameter named"
                f" 'model.{canonical.rstrip('.')}' in K3DSparkForCausalLM.",
                "name them as the published draft does: context_proj, context_norm, final_norm",
            )
    if config.get("model_type") != "k3_dspark":
        return traits.Finding(
            "unknown",
            f"vLLM takes a draft of model_type {config.get('model_type')} for no latent attention,"
            " or for another",
            "set model_type to k3_dspark",
        )
    return dspark.other_confidence(draft)


_DSPARK = dspark.ENGINE_TRAITS
ENGINE_TRAITS = replace(
    _DSPARK,
    latent=True,
    prunes_vocabulary=False,
    # vLLM passes no declaration to the Markov head: `dspark_mla.py:188`.
    extra_linears=tuple(each._replace(is_head=False) for each in _DSPARK.extra_linears),
    usual_type="k3_dspark",
    joins_layers=traits.JoinedLayers(
        name="context_kv_proj", fused=traits.MLA_DOWN, part="kv_a_proj_with_mqa"
    ),
    vllm=replace(
        _DSPARK.vllm,
        architectures=frozenset({"K3DSparkModel"}),
        as_another={},
        problem=_in_vllm,
        shares_tables=True,
        roots=traits.refused_roots("K3DSparkModel", "model", "draft_model"),
        not_executed=frozenset(),
        fc="model.context_proj",
        maps_excludes=False,
        speculators={},
    ),
    sglang=replace(_DSPARK.sglang, architectures=frozenset(), as_another={}),
)


def block_size(draft: Draft) -> Iterator[Lint]:
    """Source: `config/speculative.py:1570` of vLLM 0.33.0."""
    if draft.checkpoint.config.get("block_size") is None:
        yield told("dspark-mla-block-size", size=BLOCK_SIZE)


class DSparkMla(DSpark):
    """The MLA DSpark family, which vLLM 0.33 alone serves."""

    name = "dspark-mla"
    engine_traits = ENGINE_TRAITS
    speculators: Mapping[str, SpeculatorsForm] = {}
    projectors: Mapping[str, str] = {}
    architectures = ("K3DSparkModel",)
    prefixes = _PREFIXES
    served_unquantized = ("embed_tokens", "context_proj", "lm_head")
    whole_vocabulary = "vLLM gives it the target's whole head"
    own_marks = (r"kv_[ab]_proj",)
    misnamed: Mapping[str, tuple[str, str]] = {}
    lints = (block_size,)
    served: Served = {  # noqa: RUF012 - a constant of the class
        **{key: value for key, value in DSpark.served.items() if key != "kv_lora_rank"},
        "is_neox_style": (False, "vLLM turns interleaved rotary pairs whatever it says"),
        "rope_is_neox_style": (False, "vLLM turns interleaved rotary pairs whatever it says"),
        "rope_interleave": (True, "vLLM turns interleaved rotary pairs whatever it says"),
        "mla_use_nope": (False, "queries and keys that are not rotated, which vLLM refuses"),
        "mla_use_output_gate": (False, "a gate on the attention, which vLLM refuses"),
        "mla_use_qk_norm": (False, "normed queries and keys, which vLLM refuses"),
        "dspark_bonus_anchor": (False, "an anchor that proposes nothing, which vLLM refuses"),
        "dflash_config": (None, "vLLM reads the keys of the top level"),
    }

    @override
    def recognises(self, canonical_names: Any) -> bool:
        first = "layers.0.self_attn.kv_a_proj_with_mqa.weight"
        return {"fc.weight", first, "markov_head.markov_w1.weight"} <= set(canonical_names)

    @override
    def options(self, keys: ConfigReader) -> ConfigReader:
        given = {"block_size": keys.positive("block_size", BLOCK_SIZE)}
        return ConfigReader({**keys.config, **given}, keys.where)

    @override
    def common_keys(self, keys: ConfigReader) -> dict[str, Any]:
        common = with_latent(keys, super().common_keys(keys))
        rows, vocab = common["draft_vocab_size"], common["vocab_size"]
        if rows != vocab:
            raise CheckpointError(
                keys.where,
                f"draft_vocab_size: expected vocab_size {vocab}, got {rows}: vLLM gives a"
                " K3DSparkModel the target's whole head",
                fix="no engine serves an MLA DSpark draft of another vocabulary",
            )
        count, ids = keys.config.get("num_target_layers"), common["aux_layer_ids"]
        if count != len(ids):
            raise CheckpointError(
                keys.where,
                f"num_target_layers: expected the number of target_layer_ids {list(ids)}, got"
                f" {count}: vLLM sizes context_proj by it",
                fix="write the number of ids; the target's layers are counted by"
                " target_num_hidden_layers",
            )
        if common["sliding_window"] is not None:
            raise CheckpointError(
                keys.where,
                "layer_types: expected no sliding_attention, which vLLM does not build over latent"
                " attention",
                fix="no engine serves this draft: train it with full attention",
            )
        return common

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        table = super().tensor_specs(geometry)
        return {name: spec for name, spec in table.items() if spec.role != "vocabulary_map"}


FAMILY = DSparkMla()
