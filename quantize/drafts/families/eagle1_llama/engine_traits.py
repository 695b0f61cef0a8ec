"""EAGLE-1 in engines: fc over the target's last state, and the target's head."""

from ...architectures import declared_architecture
from ...engine_traits import (
    UNSUPPORTED,
    EngineTraits,
    Finding,
    InSglang,
    InVllm,
    ServedDraft,
    dropped_roots,
    refused_roots,
)

_IN_VLLM = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
"""It puts "Eagle" before the name of an ordinary model."""
_WHOLE_MODELS = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM": "LlamaForCausalLMEagle",
    "Qwen2ForCausalLM": "Qwen2ForCausalLMEagle",
}


def _in_vllm(draft: ServedDraft) -> Finding | None:
    """Rules of `llama_eagle.py`, whose fc has no bias, and which builds no head."""
    name = declared_architecture(draft.config)
    if name not in _IN_VLLM:
        asked = name if name.startswith("Eagle") else f"Eagle{name}"
        return Finding("config", UNSUPPORTED.format(asked), "serve it with SGLang")
    if any(tensor.endswith("lm_head.weight") for tensor in draft.tensor_names):
        return Finding(
            "load",
            "ValueError: There is no module or parameter named 'lm_head' in EagleLlamaForCausalLM.",
            "leave the head out: the target's is served",
        )
    if "fc.bias" in draft.tensor_names:
        text = "vLLM drops fc.bias, because its fc has no bias"
        return Finding("wrong", text, "serve it with SGLang, or train the draft without it")
    return _bias_of_fc(draft)


def _in_sglang(draft: ServedDraft) -> Finding | None:
    """Rules of `llama_eagle.py`, whose fc has a bias, and which reads no head."""
    name = declared_architecture(draft.config)
    if name in _WHOLE_MODELS:
        what = f"SGLang loads the draft as a whole model, {name}, and drops fc.weight"
        return Finding("wrong", what, f"set architectures to {_WHOLE_MODELS[name]}")
    if not any(tensor.endswith("fc.bias") for tensor in draft.tensor_names):
        text = "model.fc.bias stays uninitialised, and SGLang adds it (`llama_eagle.py:91`)"
        return Finding("wrong", text, "store fc.bias, all zero, or serve it with vLLM")
    if any(tensor.endswith("lm_head.weight") for tensor in draft.tensor_names):
        text = "SGLang drops lm_head.weight and serves the target's head"
        return Finding("wrong", text, "leave the head out, if it is the target's")
    return _bias_of_fc(draft)


def _bias_of_fc(draft: ServedDraft) -> Finding | None:
    """`bias` of EAGLE-1's config means fc, and engines take it for the attention's.

    Source: vLLM 0.33 `llama.py:267`, SGLang 0.5.23 `llama.py:339`; executed.
    """
    config = draft.config
    stored = any(name.endswith("q_proj.bias") for name in draft.tensor_names)
    if not config.get("bias") or config.get("qkv_bias") is False or stored:
        return None
    return Finding(
        "wrong",
        "model.layers.0.self_attn.qkv_proj.bias stays uninitialised: 'bias: true' in config.json"
        " asks for it, and none is stored",
        "remove 'bias' from config.json, where it was meant for fc",
    )


ENGINE_TRAITS = EngineTraits(
    always_fc=True,
    head="target's",
    vllm=InVllm(
        architectures=frozenset({"EagleLlamaForCausalLM", "LlamaForCausalLM"}),
        served_as="eagle",
        problem=_in_vllm,
        roots=refused_roots("LlamaModel", "model"),
        uneven_heads="AssertionError: vllm/model_executor/models/llama.py:145: assert"
        " self.total_num_heads % tp_size == 0",
    ),
    sglang=InSglang(
        architectures=frozenset({"LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"}),
        refused_names={"EagleLlamaForCausalLM": "set architectures to LlamaForCausalLMEagle"},
        served_as="EAGLE",
        problem=_in_sglang,
        roots=dropped_roots("model."),
        layer_prefix="model.layers.{n}.{path}",  # the whole name is passed on
        whole_models=_WHOLE_MODELS,
    ),
)
