"""What engines make of a target's MTP layer in a folder of its own.

Loading was executed with the engines' own classes (`tests/engines/mtp.py`). The routed
experts of a mixture are one fused module in both, `experts`; unquantized ones load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..drafts.architectures import declared_architecture
from ..drafts.fused import FusedLinear
from ..drafts.shared.mixture.names import is_expert
from ..drafts.shared.mtp.geometry import around_layer
from ..stored.parts import COMPANIONS
from .contract import Finding, Module, Question
from .linears import layer_linears

_ATTENTION = "self_attn."
_HEAD = Module("lm_head", "lm_head", ("lm_head",), "column")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How one engine builds the layer of a family.

    Attributes:
        architectures: names in config.json for which the loading was executed.
        own_heads: each module is built with a head of its own, of this name, with {n}.
        layer: the name of the decoder layer, with {n} for its number behind the target's.
        prefix: the same as excludes are held against, "" = none.
        prefixes: the prefix for some of the architectures, where it differs.
        attention: what stands for "self_attn." in the name of the layer's attention.
        no_parameter: the error for a stored tensor that has no parameter, with {name}.
    """

    architectures: frozenset[str]
    layer: str
    prefix: str
    prefixes: Mapping[str, str] = field(default_factory=dict)
    attention: str = _ATTENTION
    no_parameter: str = ""
    own_heads: str = ""


_KEY = "KeyError: '{name}'"
_QWEN = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"})
NOT_EXECUTED = frozenset(
    {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
)
"""Other names that vLLM rewrites to those of layers: `config/speculative.py:987`."""
VLLM: Mapping[str, Served] = {
    "mimo-mtp": Served(
        architectures=frozenset({"MiMoForCausalLM"}),
        layer="model.mtp_layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter="ValueError: There is no module or parameter named '{name}' in MiMoMTP.",
    ),
    "deepseek-mtp": Served(
        architectures=frozenset({"DeepseekV3ForCausalLM"}),
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter=_KEY,
    ),
    "glm4-moe-mtp": Served(
        architectures=frozenset({"Glm4MoeForCausalLM"}),
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter=_KEY,
    ),
    "qwen3-next-mtp": Served(
        architectures=_QWEN,
        layer="model.layers.0.",
        prefix="mtp.layers.0.",
        no_parameter="ValueError: There is no module or parameter named '{name}' in"
        " Qwen3_5MultiTokenPredictor.",
    ),
    "step3p5-mtp": Served(
        architectures=frozenset({"Step3p5ForCausalLM"}),
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.mtp_block.",
        no_parameter=_KEY,
        own_heads="model.layers.{n}.shared_head.head",
    ),
}
SGLANG: Mapping[str, Served] = {
    "mimo-mtp": Served(
        architectures=frozenset({"MiMoForCausalLM"}), layer="model.mtp_block.", prefix=""
    ),
    "deepseek-mtp": Served(
        architectures=frozenset({"DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"}),
        layer="model.decoder.",
        prefix="model.decoder.",
    ),
    "glm4-moe-mtp": Served(
        architectures=frozenset({"Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN"}),
        layer="model.decoder.",
        prefix="model.decoder.",
    ),
    "qwen3-next-mtp": Served(
        architectures=_QWEN,
        layer="model.layers.0.",
        prefix="mtp.layers.0.",  # `qwen3_5_mtp.py`
        prefixes={"Qwen3NextForCausalLM": "model.layers.0."},  # `qwen3_next_mtp.py`
        attention="",
    ),
    "step3p5-mtp": Served(
        architectures=frozenset({"Step3p5ForCausalLM"}),
        layer="model.mtp_block.",
        prefix="model.mtp_block.",
        no_parameter=_KEY,
        own_heads="model.shared_head.head",
    ),
}


def architectures(table: Mapping[str, Served]) -> frozenset[str]:
    """All names of a table."""
    return frozenset().union(*(served.architectures for served in table.values()))


def modules(
    question: Question, served: Served, fused: Callable[[FusedLinear], str]
) -> tuple[Module, ...]:
    """The linears that may be quantized; fc is a plain nn.Linear in both engines.

    VLLM alone builds Qwen's fc under the target's declaration, which none of ours has it in.

    Args:
        question: of a folder whose config.json is the target's own.
        served: how the engine builds the layer.
        fused: what the engine calls a fused linear.
    """
    first = question.config.get("num_hidden_layers", 0)
    mixture = any(is_expert(name) for name in question.tensor_names)
    shared = "shared_expert" if question.family == "qwen3-next-mtp" else "shared_experts"
    mlp = f"mlp.{shared}" if mixture else "mlp"
    prefix = served.prefixes.get(declared_architecture(question.config), served.prefix)
    layers = tuple(
        Module(
            served.layer.format(n=first + i) + path.replace(_ATTENTION, served.attention),
            prefix.format(n=first + i) + path,
            parts,
            sharding,
        )
        for i in range(question.num_layers)
        for path, parts, sharding in layer_linears(question.family, f"layers.{i}", fused, mlp=mlp)
    )
    heads = (
        Module(name, name, (around_layer(i, "lm_head"),), "column")
        for i in range(question.num_layers if served.own_heads else 0)
        for name in (served.own_heads.format(n=first + i),)
    )
    return (*layers, *heads) if served.own_heads else (*layers, _HEAD)


def vllm_problem(question: Question) -> Finding | None:
    """VLLM hands an MTP layer the target's quantization, never the draft's own.

    Source: `vllm_config.quant_config` in `deepseek_mtp.py:74` and its kin, where `vllm_config` is
    the target's; with the same declaration in the target's config the folder loads (executed).
    """
    problem = _misconfigured(question)
    if problem is not None or question.declaration is None:
        return problem
    stored = sorted(n for n in question.tensor_names if n.rpartition(".")[2] in COMPANIONS)
    if question.family == "step3p5-mtp":
        return _of_step(question)
    if not stored:
        return None
    served = VLLM[question.family]
    layer = served.layer.format(n=question.config.get("num_hidden_layers", 0))
    return Finding(
        "load",
        _of_qwen(stored[0])
        if question.family == "qwen3-next-mtp" and is_expert(stored[0])
        else served.no_parameter.format(name=_in_vllm(stored[0], layer)),
        "give the target this quantization_config with its own layers ignored (--hf-overrides):"
        " vLLM reads the target's for an MTP layer; or serve it with SGLang",
    )


def _of_step(question: Question) -> Finding | None:
    """What vLLM says of a quantized draft of Step-3.5, which it does read by its own declaration.

    Its loader wants every parameter to be in the folder, and compressed-tensors gives the attention
    some for its KV cache: `step3p5_mtp.py:330`. Executed with Quark's and ModelOpt's layouts too.
    """
    if question.method != "compressed-tensors":
        return None
    first = question.config.get("num_hidden_layers", 0)
    name = f"model.layers.{first}.mtp_block.self_attn.attn.k_zero_point"
    return Finding("load", _ABSENT.format(name=name), "use Quark's layout, whose folder loads")


def _of_qwen(name: str) -> str:
    """What its loader says of a routed expert: `AutoWeightsLoader`, not that of the layer."""
    module, _, leaf = name.partition(".experts.")
    stacked = "w2" if ".down_proj." in leaf else "w13"
    return (
        f"AttributeError: Layer {module}.experts has no parameter"
        f" '{stacked}_{leaf.rpartition('.')[2]}' for checkpoint weight '{name}'"
    )


def _misconfigured(question: Question) -> Finding | None:
    """Keys without which vLLM does not build the layer that the tensors are of."""
    config = question.config
    if _is_dense_qwen3_next(question):
        text = "RuntimeError: No Qwen3Next layer found in the model.layers."
        return Finding("init", text, _EXPERTS_WANTED)
    if config.get("model_type") == "mimo" and "auto_map" not in config:
        return Finding(
            "config",
            "ValidationError: 1 validation error for SpeculativeConfig Value error, The checkpoint"
            " you are trying to load has model type `mimo` but Transformers does not recognize this"
            " architecture.",
            "set model_type to qwen2, whose layers these are",
        )
    if question.family == "step3p5-mtp" and not any(
        name.endswith("embed_tokens.weight") for name in question.tensor_names
    ):
        name = "model.embed_tokens.weight"
        return Finding(
            "load", _ABSENT.format(name=name), "add the target's embedding to the folder"
        )
    number = config.get("num_hidden_layers", 0)
    numbered = any(name.startswith(f"model.layers.{number}.") for name in question.tensor_names)
    if question.family == "deepseek-mtp" and not numbered:  # `deepseek_mtp.py:505`
        return Finding(
            "load",
            f"ValueError: MTP speculative decoding layer {number} weights missing from checkpoint.",
            f"name the tensors model.layers.{number}, or serve SGLang's export with SGLang",
        )
    corrected = any(name.endswith("e_score_correction_bias") for name in question.tensor_names)
    if question.family == "deepseek-mtp" and corrected and "topk_method" not in config:
        name = f"model.layers.{number}.mtp_block.mlp.gate.e_score_correction_bias"
        return Finding("load", _KEY.format(name=name), "add topk_method: noaux_tc to config.json")
    return None


_ABSENT = (
    "RuntimeError: Some parameters like {name} are not in the checkpoint and will falsely use"
    " random initialization"
)
_EXPERTS_WANTED = "engines serve layers of Qwen3-Next with experts alone"


def _is_dense_qwen3_next(question: Question) -> bool:
    """Whether it has an MLP, which only Qwen3.5's layers have in engines; executed."""
    own = declared_architecture(question.config) == "Qwen3NextForCausalLM"
    return own and not any(is_expert(name) for name in question.tensor_names)


def sglang_problem(question: Question) -> Finding | None:
    """What SGLang takes otherwise than the layer's declaration says, or was not seen to take.

    Quantized experts are one module with kernels of their own, which were not executed.
    """
    if question.family == "step3p5-mtp":
        what = "its config.json names code of its own, without which SGLang does not read it"
        return Finding("unknown", what, "try it")
    if (
        question.family in SGLANG and question.num_layers > 1
    ):  # `deepseek_weight_loader.py:567`, `glm4_moe.py:1080`; executed
        return Finding(
            "load",
            "AssertionError: Only 1 nextn layer is supported",
            "serve several MTP layers with vLLM, which has a step for each",
        )
    if question.family == "deepseek-mtp":
        what = "loading of its kv_b_proj calls a GPU, which was not there when it was tried"
        return Finding("unknown", what, "try it")
    if _is_dense_qwen3_next(question):
        told = f"ValueError: Tensor parallel size {question.tp} is greater than the number of"
        none = not question.config.get("num_experts")
        unsure = "a layer of Qwen3-Next without experts: loading it was not executed"
        return Finding(
            "init" if none else "unknown",
            f"{told} experts 0." if none else unsure,
            _EXPERTS_WANTED,
        )
    name = declared_architecture(question.config)
    if name.startswith("Qwen3_5") and question.signature.startswith("modelopt nvfp4"):
        return Finding(  # whatever is excluded: `qwen3_5_mtp.py:58`, and executed
            "load",
            "AssertionError: sglang/srt/layers/linear.py:894: assert param_data.shape =="
            " loaded_weight.shape",
            "use another format: SGLang builds this layer in BF16 where ModelOpt's NVFP4 is"
            " declared",
        )
    experts = any(is_expert(name) for name in question.tensor_names)
    if question.family not in SGLANG or question.declaration is None or not experts:
        return None
    what = "experts of a mixture that are stored quantized: loading them was not executed"
    return Finding("unknown", what, "try it, or serve the layer in BF16")


def _in_vllm(name: str, layer: str) -> str:
    """A tensor of a decoder layer as vLLM looks for it."""
    if name.startswith("mtp."):
        return name.removeprefix("mtp.")
    if ".experts." in name:
        stacked = "w2" if ".down_proj." in name else "w13"
        return f"{layer}mlp.experts.routed_experts.{stacked}_{name.rpartition('.')[2]}"
    at = max(name.find("self_attn."), name.find("mlp."))
    return layer + name[at:] if at >= 0 else name
