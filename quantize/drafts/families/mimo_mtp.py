"""The MTP layer of MiMo: a dense Qwen2 layer, `model.mtp_layers.0` of MiMo-7B.

vLLM 0.33 serves MiMoForCausalLM as `MiMoMTPModel` (`config/speculative.py:795`), SGLang 0.5.23 as
`MiMoMTP`; both zero the embedding at position 0, put the state first and feed back what the head
reads (`mimo_mtp.py:78`).
"""

import re

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..config_reader import ConfigReader
from ..engine_traits import Finding, MtpLayer, ServedDraft
from ..shared import mtp
from ..shared.layers import read_heads


def _in_vllm(draft: ServedDraft) -> Finding | None:
    hidden, heads, size = (
        draft.config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if type(hidden) is type(heads) is type(size) is int and heads and hidden // heads != size:
        return Finding(
            "load",
            f"RuntimeError: start (0) + length exceeds dimension size: {hidden} / {heads} heads",
            "serve it with SGLang: vLLM does not read head_dim here",
        )
    known = draft.config.get("model_type") != "mimo" or "auto_map" in draft.config
    if known:
        return None
    return Finding(
        "config",
        "ValidationError: 1 validation error for SpeculativeConfig Value error, The checkpoint you"
        " are trying to load has model type `mimo` but Transformers does not recognize this"
        " architecture.",
        "set model_type to qwen2, whose layers these are",
    )


ENGINE_TRAITS = mtp.mtp_traits(
    frozenset({"MiMoForCausalLM"}),
    vllm=MtpLayer(
        layer="model.mtp_layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        misconfigured=_in_vllm,
        lists_parts=True,
    ),
    sglang=MtpLayer(
        layer="model.mtp_block.",
        prefix="",
        cache_scales=True,
    ),
)


class MimoMtp(mtp.Mtp):
    """MiMo's layer; embedding and head are the target's."""

    name = "mimo-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("MiMoForCausalLM", "MiMoMTPModel", "MiMoMTP")
    layer = re.compile(r"model\.mtp_layers\.\d+\.")
    outer = {  # noqa: RUF012 - a constant of the class
        "input_proj": "fc",
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "state_norm",
        "final_layernorm": "norm",
    }
    state_first = True
    feeds_back_normed = True

    @override
    def geometry(self, keys: ConfigReader) -> mtp.MtpGeometry:
        if keys.flag("use_sliding_window", False):
            raise CheckpointError(
                keys.where,
                "use_sliding_window: expected false, got true",
                fix=f"a draft of {self.name} with a sliding window cannot be replayed",
            )
        common = mtp.read_mtp(keys, self.name)
        # Biases regardless of attention_bias: `qwen2.py` builds them so.
        return mtp.MtpGeometry(**common, attention=read_heads(keys, common, input_bias=True))


FAMILY = MimoMtp()
