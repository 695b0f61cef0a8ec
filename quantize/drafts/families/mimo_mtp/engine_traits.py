"""MiMo's MTP layer in engines."""

from ...engine_traits import INVALID, Finding, MtpLayer, ServedDraft
from ...shared.mtp.engine_traits import NO_PARAMETER, mtp_traits


def _in_vllm(draft: ServedDraft) -> Finding | None:
    hidden, heads, size = (
        draft.config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if type(hidden) is type(heads) is type(size) is int and heads and hidden // heads != size:
        text = f"RuntimeError: start (0) + length exceeds dimension size: {hidden} / {heads} heads"
        return Finding("load", text, "serve it with SGLang: vLLM does not read head_dim here")
    if draft.config.get("model_type") != "mimo" or "auto_map" in draft.config:
        return None
    text = (
        "The checkpoint you are trying to load has model type `mimo` but Transformers does not"
        " recognize this architecture."
    )
    return Finding(
        "config", INVALID.format(text), "set model_type to qwen2, whose layers these are"
    )


ENGINE_TRAITS = mtp_traits(
    frozenset({"MiMoForCausalLM"}),
    vllm=MtpLayer(
        layer="model.mtp_layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter="ValueError: There is no module or parameter named '{name}' in MiMoMTP.",
        misconfigured=_in_vllm,
        lists_parts=True,
    ),
    sglang=MtpLayer(
        layer="model.mtp_block.",
        prefix="",
        no_parameter=NO_PARAMETER,
        most_modules=1,
        cache_scales=True,
    ),
)
