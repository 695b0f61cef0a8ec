"""What engines make of a target's MTP layer in a folder of its own.

Loading was executed with the engines' own classes (`experiments/engines/mtp.py`). The routed
experts of a mixture are one fused module in both, `experts`; unquantized ones load.
"""

from ..drafts.architectures import declared_architecture
from ..drafts.engine_traits import (
    GATE_UP,
    MLA_DOWN,
    QKV,
    EngineTraits,
    Finding,
    FusedLinear,
    MtpLayer,
    Sharding,
)
from ..drafts.shared.mixture import is_expert
from ..drafts.shared.mtp import around_layer
from ..stored.stored_declaration import COMPANIONS
from .contract import EngineName, Module, Question, UnsureError
from .engine_rows import said
from .excludes import scheme_of

# ---- The linears of one decoder layer as engines build them: fused, and split by shards

Linear = tuple[str, tuple[str, ...], Sharding]
"""Path in the layer, canonical names of the parts, sharding."""


def layer_linears(
    traits: EngineTraits, layer: str, engine: EngineName, *, mlp: str = "mlp"
) -> list[Linear]:
    """Those of one layer, in order.

    Args:
        layer: canonical name of the layer, "layers.0".
        mlp: the block with gate, up and down, of a mixture that every token sees.
    """

    def fused(block: str, linear: FusedLinear, sharding: Sharding) -> Linear:
        parts = tuple(f"{layer}.{block}.{member}" for member in linear.members)
        return f"{block}.{getattr(linear, engine)}", parts, sharding

    def alone(block: str, leaf: str, sharding: Sharding) -> Linear:
        return f"{block}.{leaf}", (f"{layer}.{block}.{leaf}",), sharding

    mla = [
        fused("self_attn", MLA_DOWN, "replicated"),
        alone("self_attn", "q_b_proj", "column"),
        alone("self_attn", "kv_b_proj", "column"),
    ]
    return [
        *(mla if traits.latent else [fused("self_attn", QKV, "column")]),
        alone("self_attn", "o_proj", "row"),
        fused(mlp, GATE_UP, "column"),
        alone(mlp, "down_proj", "row"),
        *(alone(conv, "kernel_projection", "replicated") for conv in traits.convolutions),
    ]


EXPERTS_LOADED = frozenset(
    {
        "compressed-tensors fp8 channel token-dynamic",
        "compressed-tensors int4 group128 none",
        "fp8 fp8 block group-dynamic",
        "modelopt fp8 tensor tensor-static",
        "quark fp8 channel token-dynamic",
    }
)
"""Signatures of which both engines loaded routed experts, on H200."""
GRAFT = "take the layer of the BF16 original: draftquant graft TARGET LAYER --replace --out O"
GRAFTED = frozenset({"quark", "compressed-tensors", "fp8", "modelopt"})
"""Each quant_method in which graft declares a layer; with float experts all were executed."""
ROUTED = ".experts."
"""In the names of the linears that engines fuse into one module."""
_ATTENTION = "self_attn."
_HEAD = Module("lm_head", "lm_head", ("lm_head",), "column")


def modules(question: Question, served: MtpLayer, engine: EngineName) -> tuple[Module, ...]:
    """The linears that may be quantized; fc is plain in both, but for Qwen's in vLLM."""
    first = question.config.get("num_hidden_layers", 0)
    mixture = any(is_expert(name) for name in question.tensor_names)
    mlp = f"mlp.{question.traits.shared_experts}" if mixture else "mlp"
    layers = tuple(
        Module(
            served.layer.format(n=first + i) + path.replace(_ATTENTION, served.attention),
            first_prefix(question, served, i) + path,
            parts,
            sharding,
        )
        for i in range(question.num_layers)
        for path, parts, sharding in layer_linears(question.traits, f"layers.{i}", engine, mlp=mlp)
    )
    heads = (
        Module(name, name, (around_layer(i, "lm_head"),), "column")
        for i in range(question.num_layers if served.own_heads else 0)
        for name in (served.own_heads.format(n=first + i),)
    )
    fc = [Module("model.fc", served.fc, ("fc",), "column")] if served.fc else []
    return (*layers, *fc, *heads) if served.own_heads else (*layers, *fc, _HEAD)


def built_as_floats(question: Question, module: Module) -> str | None:
    """What to do where it is stored quantized; None where the declaration is asked."""
    served = question.own.mtp
    beginnings = served.floats(question) if served is not None else {}
    found = (remedy for name, remedy in beginnings.items() if module.prefix.startswith(name))
    return next(found, None)


def vllm_problem(question: Question, served: MtpLayer) -> Finding | None:
    """VLLM hands most MTP layers the target's quantization, never the draft's own.

    Source: `vllm_config.quant_config` in `deepseek_mtp.py:74` and its kin, where `vllm_config` is
    the target's; with the same declaration in the target's config the folder loads (executed).
    """
    problem = served.misconfigured(question)
    if problem is not None or question.declaration is None:
        return problem
    if question.inside_target:
        return _experts_problem(question, served)
    if served.declared is not None:
        return served.declared(question)
    stored = sorted(n for n in question.tensor_names if n.rpartition(".")[2] in COMPANIONS)
    if not stored:
        return None
    layer = served.layer.format(n=question.config.get("num_hidden_layers", 0))
    text = served.no_parameter.format(name=in_engine(stored[0], layer))
    if served.no_expert and is_expert(stored[0]):  # by `AutoWeightsLoader`, not that of the layer
        module, _, leaf = stored[0].partition(".experts.")
        stacked, leaf = "w2" if ".down_proj." in leaf else "w13", leaf.rpartition(".")[2]
        names = {"experts": module, "stacked": stacked, "leaf": leaf, "name": stored[0]}
        text = served.no_expert.format(**names)
    return said("beside-target", text=text)


def sglang_problem(question: Question, served: MtpLayer) -> Finding | None:
    """What SGLang takes otherwise than the layer's declaration says, or was not seen to take."""
    if served.most_modules is not None and question.num_layers > served.most_modules:
        return said("one-mtp-layer")
    if (problem := served.misconfigured(question)) is not None:
        return problem
    if question.declaration is None or not any(map(is_expert, question.tensor_names)):
        return None
    if question.inside_target:
        return _experts_problem(question, served)
    return said("experts-beside")


def _experts_problem(question: Question, served: MtpLayer) -> Finding | None:
    """Quantized experts of a layer in its target's folder that nobody has loaded in this format."""
    stored = [
        n for n in question.tensor_names if ROUTED in n and n.rpartition(".")[2] in COMPANIONS
    ]
    if not stored:
        return None
    module = min(stored).rpartition(".")[0]
    path = module[module.index("mlp.") :]
    asked = Module(module, f"{first_prefix(question, served)}{path}", (), "column")
    try:
        scheme = scheme_of(question, asked)
    except UnsureError as exc:
        return said("unsure-targets", why=str(exc))
    if scheme is not None and scheme.signature in EXPERTS_LOADED:
        return None
    return said("experts-inside")


def first_prefix(question: Question, served: MtpLayer, layer: int = 0) -> str:
    """The beginning of the names that excludes of the first, or another, layer are held against."""
    prefix = served.prefixes.get(declared_architecture(question.config), served.prefix)
    return prefix.format(n=question.config.get("num_hidden_layers", 0) + layer)


def of_other_layer(question: Question, module: Module) -> Module | None:
    """The same linear of the target's first layer; None where there is none."""
    served = question.own.mtp
    first = first_prefix(question, served) if served is not None else ""
    outside = served is None or not question.inside_target or module.leaf in ("fc", "lm_head")
    if outside or not module.prefix.startswith(first):
        return None
    return module._replace(prefix=f"model.layers.0.{module.prefix.removeprefix(first)}")


def in_engine(name: str, layer: str) -> str:
    """A tensor of a decoder layer as an engine looks for it."""
    if name.startswith("mtp."):
        return name.removeprefix("mtp.")
    if ".experts." in name:
        stacked = "w2" if ".down_proj." in name else "w13"
        return f"{layer}mlp.experts.routed_experts.{stacked}_{name.rpartition('.')[2]}"
    at = max(name.find("self_attn."), name.find("mlp."))
    return layer + name[at:] if at >= 0 else name
