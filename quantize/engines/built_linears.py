"""The linears that an engine builds for a draft, and what fills them.

Executed with vLLM 0.33.0 and SGLang 0.5.23 (`experiments/engines/run.py` compares them), MTP layers
of targets in their own folder by `experiments/engines/mtp.json`: the routed experts of a mixture
are one fused module in both, `experts`; unquantized ones load.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..drafts.architectures import declared_architecture
from ..drafts.engine_traits import (
    GATE_UP,
    MLA_DOWN,
    QKV,
    EngineTraits,
    FusedLinear,
    Linear,
    MtpLayer,
    Sharding,
)
from ..drafts.shared.mtp import around_layer
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..gpus import AMD
from .contract import EngineName, Module, Question, concatenated
from .declared_forms import LinearScheme, Signature

# ---- The linears of one decoder layer as engines build them: fused, and split by shards


def layer_linears(
    traits: EngineTraits, layer: str, engine: EngineName, *, mlp: str = "mlp"
) -> list[Linear]:
    """The linears of one layer, in order.

    Args:
        layer: canonical name of the layer, "layers.0".
        mlp: the block with gate, up and down; in a mixture, the one that every token sees.
    """

    def fused(block: str, linear: FusedLinear, sharding: Sharding) -> Linear:
        return f"{block}.{getattr(linear, engine)}", linear.members, sharding

    def alone(path: str, sharding: Sharding) -> Linear:
        return path, (path.rpartition(".")[2],), sharding

    latent = (
        fused("self_attn", MLA_DOWN, "replicated"),
        alone("self_attn.q_b_proj", "column"),
        alone("self_attn.kv_b_proj", "column"),
    )
    own = (traits.vllm if engine == "vllm" else traits.sglang).linears
    linears = own or (
        *(latent if traits.latent else [fused("self_attn", QKV, "column")]),
        alone("self_attn.o_proj", "row"),
        fused(mlp, GATE_UP, "column"),
        alone(f"{mlp}.down_proj", "row"),
        *(alone(f"{conv}.kernel_projection", "replicated") for conv in traits.convolutions),
    )
    return [
        (path, tuple(f"{layer}.{path.rpartition('.')[0]}.{part}" for part in parts), sharding)
        for path, parts, sharding in linears
    ]


_INDEXER = "self_attn.indexer."
JOINED = "wk_weights_proj"
"""What an indexer reads of the layer's input, as one linear; never quantized."""


def indexer_linears(question: Question, layer: str, engine: EngineName) -> list[Linear]:
    """The linears of an indexer; none without one.

    Source: vLLM 0.33 `models/deepseek_v32/attention.py:71`; SGLang 0.5.23 `dsa_indexer.py:298`.
    """
    if question.config.get("index_topk") is None:
        return []
    paths: dict[str, tuple[str, ...]] = {part: (part,) for part in ("wq_b", "wk", "weights_proj")}
    turned = question.config.get("indexer_rope_interleave", False)
    if engine == "vllm" or (turned and not question.gpu.is_one_of(AMD)):
        paths = {"wq_b": ("wq_b",), JOINED: ("wk", "weights_proj")}
    return [
        (f"{_INDEXER}{path}", tuple(f"{layer}.{_INDEXER}{part}" for part in parts), "replicated")
        for path, parts in paths.items()
    ]


ROUTED = ".experts."
"""Marks the names of the linears that engines fuse into one module."""
_ATTENTION = "self_attn."


def mtp_modules(question: Question, served: MtpLayer, engine: EngineName) -> tuple[Module, ...]:
    """The linears that may be quantized; fc is plain in both, except Qwen's in vLLM."""
    first = question.config.get("num_hidden_layers") or 0
    is_mixture = getattr(question.geometry, "mixture", None) is not None
    mlp = f"mlp.{question.traits.shared_experts}" if is_mixture else "mlp"
    layers = tuple(
        Module(
            served.layer.format(n=first + i) + path.replace(_ATTENTION, served.attention),
            first_prefix(question, served, i) + path,
            parts,
            sharding,
        )
        for i in range(question.num_layers)
        for path, parts, sharding in (
            *layer_linears(question.traits, f"layers.{i}", engine, mlp=mlp),
            *indexer_linears(question, f"layers.{i}", engine),
        )
    )
    heads = [Module("lm_head", served.head.format(n=first), ("lm_head",), "column")]
    if served.own_heads:
        names = [served.own_heads.format(n=first + i) for i in range(question.num_layers)]
        own = ((name, around_layer(i, "lm_head")) for i, name in enumerate(names))
        heads = [Module(name, name, (part,), "column") for name, part in own]
    fc = [Module("model.fc", served.fc, ("fc",), "column")] if served.fc else []
    return (*layers, *fc, *heads)


def built_as_floats(question: Question, module: Module) -> str | None:
    """What to do where it is stored quantized; None where the declaration decides."""
    if module.leaf in (JOINED, "weights_proj"):
        return "keep the indexer in BF16"
    served = question.own.mtp
    beginnings = served.floats(question) if served is not None else {}
    remedies = (remedy for name, remedy in beginnings.items() if module.prefix.startswith(name))
    return next(remedies, None)


def first_prefix(question: Question, served: MtpLayer, layer: int = 0) -> str:
    """The prefix of the names that excludes are compared with, for the first or another layer."""
    prefix = served.prefixes.get(declared_architecture(question.config), served.prefix)
    return prefix.format(n=(question.config.get("num_hidden_layers") or 0) + layer)


# ---- A quantized linear as the rows of rules.toml see it

BLOCK = 128
"""Rows, and columns, of the blocks of FP8 weights that share a scale."""
_CACHE_SCALE = re.compile(r"\.self_attn\.attn\.[kv]_scale$")


def is_cache_scale(tensor: TensorInfo) -> bool:
    """Whether it is a scale of the KV cache as `quantize --kv-cache` spells it."""
    return _CACHE_SCALE.search(tensor.name) is not None and tensor.numel == 1


def has_several_global_scales(
    checkpoint: Checkpoint, parts: Mapping[str, Mapping[str, TensorInfo]]
) -> bool:
    """Whether parts of a fused linear have different ones; their values are read."""
    from ..stored.decoded_numbers import stored_scalar  # numpy
    from ..stored.linear import GLOBAL_SCALES

    scales = [t for part in parts.values() for s, t in part.items() if s in GLOBAL_SCALES]
    return len({stored_scalar(checkpoint, tensor) for tensor in scales}) > 1


def quantized_linear(
    question: Question, module: Module, scheme: LinearScheme, shapes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Facts of a module that is stored quantized, with [rows, columns] of its parts in a shard."""
    columns, signature = shapes[0][1], scheme.signature
    return {
        **question.facts,
        **vars(signature),
        "leaf": module.leaf,
        "module": module.name,
        "prefix": module.prefix,
        "suffix": scheme.suffix,
        "is_marlin": question.is_marlin,
        "renames_block_scales": declared_architecture(question.config)
        in question.traits.sglang.renames_block_scales,
        "has_own_head": bool(question.config.get("has_own_lm_head")),
        "concatenated": concatenated(signature),
        "rows": sum(rows for rows, _ in shapes),
        "columns": columns,
        "is_split": _is_split(module, shapes, signature, shared=question.tp > 1),
    }


def _is_split(
    module: Module, shapes: Sequence[tuple[int, int]], signature: Signature, *, shared: bool
) -> bool:
    """Whether a group or a block of 128 x 128 has inputs or rows in two parts or shards."""
    columns, blocks = shapes[0][1], signature.granularity == "block"
    if blocks and not (shared and module.sharding == "row"):
        every = shared and module.sharding == "column"  # else the last part may end inside a block
        return any(rows % BLOCK for rows, _ in (shapes if every else shapes[:-1]))
    return columns % (BLOCK if blocks else signature.group_size or columns) != 0
