"""Step-3.5's MTP modules in engines."""

from dataclasses import replace

from ...engine_traits import Finding, MtpLayer, ServedDraft
from ...shared.mtp.engine_traits import NO_PARAMETER, mtp_traits

_ABSENT = (
    "RuntimeError: Some parameters like {name} are not in the checkpoint and will falsely use"
    " random initialization"
)


def _in_vllm(draft: ServedDraft) -> Finding | None:
    if any(name.endswith("embed_tokens.weight") for name in draft.tensor_names):
        return None
    text = _ABSENT.format(name="model.embed_tokens.weight")
    return Finding("load", text, "add the target's embedding to the folder")


def _declared(draft: ServedDraft) -> Finding | None:
    """What vLLM says of a quantized draft, which it does read by its own declaration.

    Its loader wants every parameter to be in the folder, and compressed-tensors gives the attention
    some for its KV cache: `step3p5_mtp.py:330`. Executed with Quark's and ModelOpt's layouts too.
    """
    if draft.method != "compressed-tensors":
        return None
    first = draft.config.get("num_hidden_layers", 0)
    name = f"model.layers.{first}.mtp_block.self_attn.attn.k_zero_point"
    return Finding("load", _ABSENT.format(name=name), "use Quark's layout, whose folder loads")


def _in_sglang(_draft: ServedDraft) -> Finding | None:
    what = "SGLang reads this config.json only with the code of its own that it names"
    return Finding("unknown", what, "try it")


_TRAITS = mtp_traits(
    frozenset({"Step3p5ForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.mtp_block.",
        no_parameter=NO_PARAMETER,
        own_heads="model.layers.{n}.shared_head.head",
        misconfigured=_in_vllm,
        declared=_declared,
    ),
    sglang=MtpLayer(
        layer="model.mtp_block.",
        prefix="model.mtp_block.",
        no_parameter=NO_PARAMETER,
        own_heads="model.shared_head.head",
        misconfigured=_in_sglang,
    ),
)
ENGINE_TRAITS = replace(_TRAITS, more_types_than_layers=frozenset({"step3p5"}))
