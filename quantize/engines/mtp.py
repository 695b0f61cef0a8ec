"""What engines make of a target's MTP layer in a folder of its own.

Loading was executed with the engines' own classes (`tests/engines/mtp.py`, mtp.json).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..drafts.fused import FusedLinear
from ..stored.parts import COMPANIONS
from .contract import Finding, Module, Question
from .linears import layer_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How one engine builds the layers of a family.

    Attributes:
        architectures: names in config.json for which the loading was executed.
        class_name: of the model.
        layer: the name of the decoder layer, with {n} for its number behind the target's.
        prefix: the same as excludes are held against, "" = none.
    """

    architectures: frozenset[str]
    class_name: str
    layer: str
    prefix: str


VLLM: Mapping[str, Served] = {
    "mimo-mtp": Served(
        architectures=frozenset({"MiMoForCausalLM"}),
        class_name="MiMoMTP",
        layer="model.mtp_layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
    ),
}
SGLANG: Mapping[str, Served] = {
    "mimo-mtp": Served(
        architectures=frozenset({"MiMoForCausalLM"}),
        class_name="MiMoMTP",
        layer="model.mtp_block.",
        prefix="",
    ),
}


def architectures(table: Mapping[str, Served]) -> frozenset[str]:
    """All names of a table."""
    return frozenset().union(*(served.architectures for served in table.values()))


def modules(
    question: Question, served: Served, fused: Callable[[FusedLinear], str]
) -> tuple[Module, ...]:
    """The linears that may be quantized; fc is a plain nn.Linear in both engines.

    Args:
        question: of a folder whose config.json is the target's own.
        served: how the engine builds the layer.
        fused: what the engine calls a fused linear.
    """
    number = question.config.get("num_hidden_layers", 0)
    layers = tuple(
        Module(
            served.layer.format(n=number) + path,
            served.prefix.format(n=number) + path,
            parts,
            sharding,
        )
        for path, parts, sharding in layer_linears(question.family, "layers.0", fused)
    )
    return (*layers, Module("lm_head", "lm_head", ("lm_head",), "column"))


def vllm_problem(question: Question) -> Finding | None:
    """VLLM hands an MTP layer the target's quantization, never the draft's own.

    Source: `vllm_config.quant_config` in `deepseek_mtp.py:91` and its kin, where `vllm_config` is
    the target's; with the same declaration in the target's config the folder loads (executed).
    """
    if question.declaration is None:
        return None
    stored = sorted(n for n in question.tensor_names if n.rpartition(".")[2] in COMPANIONS)
    if not stored:
        return None
    served = VLLM[question.family]
    number = question.config.get("num_hidden_layers", 0)
    name = _in_vllm(stored[0], served.layer.format(n=number))
    return Finding(
        "load",
        f"ValueError: There is no module or parameter named {name!r} in {served.class_name}.",
        "give the target this quantization_config with its own layers ignored (--hf-overrides):"
        " vLLM reads the target's for an MTP layer; or serve it with SGLang",
    )


def _in_vllm(name: str, layer: str) -> str:
    """A tensor of a decoder layer as vLLM looks for it."""
    at = max(name.find("self_attn."), name.find("mlp."))
    return layer + name[at:] if at >= 0 else name
