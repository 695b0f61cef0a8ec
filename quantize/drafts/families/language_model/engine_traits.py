"""An ordinary language model, served as a draft."""

from ...architectures import declared_architecture
from ...engine_traits import (
    ATTENTION,
    INPUTS,
    MLP,
    NO_BIAS,
    Biases,
    EngineTraits,
    Finding,
    InSglang,
    InVllm,
    ServedDraft,
)

_BARE = ("layers.", "embed_tokens.", "norm.")


def _biases_in_vllm(draft: ServedDraft) -> Biases:
    """`llama.py:267` has both, `qwen3.py` those of its inputs."""
    if declared_architecture(draft.config) == "LlamaForCausalLM":
        return (ATTENTION, MLP)
    return (INPUTS if draft.normed_heads else None, NO_BIAS)


def _biases_in_sglang(draft: ServedDraft) -> Biases:
    qwen2 = declared_architecture(draft.config).startswith("Qwen2")
    return (None if qwen2 else ATTENTION, NO_BIAS)


def _without_root(draft: ServedDraft) -> Finding | None:
    """VLLM looks for every name but the head's below "model."."""
    bare = sorted(name for name in draft.tensor_names if name.startswith(_BARE))
    if not bare:
        return None
    name = bare[0].partition(".")[0]
    text = f"ValueError: There is no module or parameter named '{name}'"
    return Finding("load", text, 'put "model." before the names of the tensors')


ENGINE_TRAITS = EngineTraits(
    whole_model=True,
    head="unless tied",
    vllm=InVllm(
        architectures=frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}),
        served_as="draft_model",
        roots={"model.": None},
        problem=_without_root,
        refuses_absent_norm=True,
        biases=_biases_in_vllm,
        head_declared="always",  # `llama.py`, `qwen2.py`, `qwen3.py`
    ),
    sglang=InSglang(
        architectures=frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}),
        served_as="STANDALONE",
        roots={"model.": None},
        biases=_biases_in_sglang,
        layer_prefix="model.layers.{n}.{path}",  # the whole name is passed on
        renames_block_scales=frozenset({"LlamaForCausalLM"}),  # `llama.py:723`
    ),
)
