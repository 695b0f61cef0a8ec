"""The MTP layer of Qwen3-Next and Qwen3.5: attention with an output gate, an MLP or a mixture.

Below `mtp.` of the released folders. vLLM 0.33 serves it as `Qwen3NextMTP`, `Qwen3_5MTP` and
`Qwen3_5MoeMTP` (`config/speculative.py:908`, `:987`), SGLang 0.5.23 as `Qwen3NextForCausalLMMTP`
and `Qwen3_5ForCausalLMMTP` (`model_config.py:1134`, `:1159`). Neither zeroes the embedding at
position 0, and both feed back what the head reads (`qwen3_5_mtp.py:203`). Norms multiply by
1 + weight (`GemmaRMSNorm`).

Qwen3.5 keeps the sizes in text_config. Of text its three rotary positions are equal, so that it
turns by one angle.
"""

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ...config_reader import ConfigReader, Served
from ...shared.mixture.names import read_qwen_mixture
from ...shared.mtp.geometry import MtpGroupedGeometry
from ...shared.mtp.names import GroupedMtp, read_mtp, rotated_part
from .engine_traits import ENGINE_TRAITS
from .speculators_form import FORMS

_SERVED: Served = {
    "mtp_num_hidden_layers": (1, "several layers"),
    "attn_output_gate": (True, "attention without a gate, as where SpecForge names no key"),
    "attention_bias": (False, "biases, of which engines know nothing"),
    "qkv_bias": (False, "biases, of which engines know nothing"),
    "mtp_use_dedicated_embeddings": (False, "an embedding of its own"),
}
_SPECFORGE = "Qwen3_5MTPDraftModel"
"""As which SpecForge trains it; its first layers, at 0958d4d, had no gate and other norms."""
_MULTIMODAL = "model.language_model.embed_tokens."


class Qwen3NextMtp(GroupedMtp):
    """Qwen's layer; embedding and head are the target's."""

    name = "qwen3-next-mtp"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    architectures = (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3NextMTP",
        "Qwen3_5MTP",
        "Qwen3_5MoeMTP",
        "Qwen3NextForCausalLMMTP",
        "Qwen3_5ForCausalLMMTP",
        _SPECFORGE,
    )
    layer = re.compile(r"mtp\.|mtp_layers\.0\.")
    outer = {  # noqa: RUF012 - a constant of the class
        "fc": "fc",
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "state_norm",
        "norm": "norm",
        "lm_head": "lm_head",  # as SpecForge saves it
        "layers.0": "layers.0",  # the layer itself, which stands beside them
        "input_proj": "fc",  # below mtp_layers.0, as speculators saves it
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "state_norm",
        "final_layernorm": "norm",
    }
    relatives = {  # noqa: RUF012 - likewise
        "mlp.experts.gate_up_proj": "a mixture whose experts are stacked in one tensor"
    }
    state_first = False
    masks_first = False
    feeds_back_normed = True
    zero_centred = True

    @override
    def canonical_name(self, name: str) -> str:
        if name.startswith(_MULTIMODAL):
            return name.removeprefix("model.language_model.")
        return super().canonical_name(name)

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> MtpGroupedGeometry:
        keys = ConfigReader(config, where)
        if config.get("text_config") is not None:
            keys = keys.section("text_config")
        trained = config.get("architectures") == [_SPECFORGE]
        _refuse_others(keys, gate_named=trained)
        mixture = read_qwen_mixture(keys) if _has_experts(keys) else None
        part, rest = rotated_part(keys, 1.0 if trained else 0.25)
        if mixture is not None:
            rest.setdefault("intermediate_size", mixture.width)  # of no module
        common = read_mtp(rest, keys.where, self.name)
        heads = common["num_attention_heads"]
        head_dim = keys.positive("head_dim", common["hidden_size"] // heads)
        return MtpGroupedGeometry(
            **common,
            mixture=mixture,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            qkv_bias=False,
            qk_norm=True,
            rotary_dim=int(head_dim * part),
            output_gate=True,
        )


def _refuse_others(keys: ConfigReader, *, gate_named: bool) -> None:
    """Refuse a layer that is not one, or not as it was released.

    Args:
        gate_named: a missing attn_output_gate means that there is none.

    Raises:
        CheckpointError: it is another, by which key.
    """
    without_gate = gate_named and keys.config.get("attn_output_gate") is None
    named = {**keys.config, "attn_output_gate": False} if without_gate else keys.config
    ConfigReader(named, keys.where).refuse_others(_SERVED)


def _has_experts(keys: ConfigReader) -> bool:
    """As vLLM decides for a layer numbered 0: `qwen3_next.py`, `Qwen3NextDecoderLayer`."""
    config, only = keys.config, keys.config.get("mlp_only_layers")
    dense = isinstance(only, list) and 0 in only
    return (
        bool(config.get("num_experts")) and config.get("decoder_sparse_step", 1) == 1 and not dense
    )


FAMILY = Qwen3NextMtp()
