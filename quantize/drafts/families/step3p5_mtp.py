"""The MTP modules of Step-3.5: three, one for each draft step, each with its own head.

`model.layers.45` to `47` of the released folder: attention within a window, with a gate for each
head, and a dense MLP. vLLM 0.33 serves Step3p5ForCausalLM as `Step3p5MTP`
(`config/speculative.py:1041`), SGLang 0.5.23 too (`model_config.py:1097`). In both, module i
drafts token i + 1 and reads the output of module i - 1 before its last norm; the first one reads
that of the target's last layer before the final norm (`step3p5.py`, `compute_logits`); neither
zeroes the embedding at position 0. Norms multiply by 1 + weight (`GemmaRMSNorm`).

Per-layer keys are lists over the target's layers and these, by layer number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..config_reader import ConfigReader
from ..engine_traits import Finding, MtpLayer, ServedDraft
from ..family import TensorSpec, Weights
from ..forward import DraftForward, OnInput
from ..geometry import GroupedAttention
from ..shared.mtp import Mtp, MtpGeometry, mtp_traits, read_mtp


def _in_vllm(draft: ServedDraft) -> Finding | None:
    there = any(name.endswith("embed_tokens.weight") for name in draft.tensor_names)
    if there:
        return None
    return Finding(
        "load",
        "RuntimeError: Some parameters like model.embed_tokens.weight are not in the checkpoint"
        " and will falsely use random initialization",
        "add the target's embedding to the folder",
    )


def _declared(draft: ServedDraft) -> Finding | None:
    """What vLLM says of a quantized draft, which it does read by its own declaration.

    Its loader wants every parameter to be in the folder, and compressed-tensors gives the attention
    some for its KV cache: `step3p5_mtp.py:330`. Executed with Quark's and ModelOpt's layouts too.
    """
    if draft.method != "compressed-tensors":
        return None
    first = draft.config.get("num_hidden_layers", 0)
    return Finding(
        "load",
        "RuntimeError: Some parameters like"
        f" model.layers.{first}.mtp_block.self_attn.attn.k_zero_point are not in the checkpoint"
        " and will falsely use random initialization",
        "use Quark's layout, whose folder loads",
    )


ENGINE_TRAITS = mtp_traits(
    frozenset({"Step3p5ForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.mtp_block.",
        own_heads="model.layers.{n}.shared_head.head",
        misconfigured=_in_vllm,
        declared=_declared,
    ),
    sglang=MtpLayer(
        layer="model.mtp_block.",
        prefix="model.mtp_block.",
        own_heads="model.shared_head.head",
        misconfigured=lambda _draft: Finding(
            "unknown",
            "SGLang reads this config.json only with the code of its own that it names",
            "try it",
        ),
    ),
    more_types_than_layers=frozenset({"step3p5"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpStepGeometry(MtpGeometry):
    """Modules that read the output of the target's last layer before the final norm."""

    target_layers: int
    window: int | None

    @property
    @override
    def reads_layers(self) -> bool:
        return True  # though there is no fc over it

    @override
    def window_of(self, layer: int) -> int | None:
        return self.window


_SLIDING, _FULL = "sliding_attention", "full_attention"
_EPSILON = 1e-5
"""Value without rms_norm_eps in config.json: SGLang `configs/step3p5.py`, transformers' config."""


class Step3p5Mtp(Mtp):
    """Step's modules; the embedding is the target's."""

    name = "step3p5-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("Step3p5ForCausalLM", "Step3p5MTP")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    outer = {  # noqa: RUF012 - a constant of the class
        "eh_proj": "fc",
        "enorm": "embedding_norm",
        "hnorm": "state_norm",
        "shared_head.norm": "norm",
        "shared_head.head": "lm_head",
        "shared_head.output": "lm_head",
        "transformer.shared_head.norm": "norm",  # as released
        "transformer.shared_head.output": "lm_head",
    }
    mark = "self_attn.g_proj"
    foreign = "mlp.gate"
    no_cache_scales = (
        "vLLM 0.33 counts what it loads of such a layer, and ends with an IndexError where that is"
        " more than the weights (step3p5_mtp.py:312)"
    )
    shared_tables = ()  # vLLM `step3p5_mtp.py:159`, and its loader wants the embedding too
    state_first = False
    masks_first = False
    feeds_back_normed = False
    zero_centred = True

    @override
    def served_name(self, module: str) -> str:
        # The head, as both engines rename it when they load it.
        return module.replace(".transformer.", ".").replace(
            "shared_head.output", "shared_head.head"
        )

    @override
    def geometry(self, keys: ConfigReader) -> MtpStepGeometry:
        config, number = keys.config, keys.positive("num_hidden_layers")
        count = keys.positive("num_nextn_predict_layers", 1)
        types, mtp_types = config.get("layer_types"), config.get("mtp_layer_types")
        if isinstance(types, list) and isinstance(mtp_types, list):  # as transformers 5 writes them
            types = [*types, *mtp_types]
        kind = _same_in_all(keys, types, number, count, "layer_types")
        fits = kind in (_SLIDING, _FULL)
        if not fits:
            raise CheckpointError(
                keys.where,
                f"layer_types: expected {_SLIDING!r} or {_FULL!r}, got {kind!r}",
                fix="no engine serves other attention in these modules",
            )
        _refuse_others(keys, number, count)
        part = _same_in_all(keys, config.get("partial_rotary_factors"), number, count,
                            "partial_rotary_factors")  # fmt: skip
        theta = config.get("rope_theta")
        if isinstance(theta, list):
            theta = _same_in_all(keys, theta, number, count, "rope_theta")
        scaled = kind in (keys.items("yarn_only_types") or [kind])
        flat = {
            **{name: value for name, value in config.items() if name != "rope_parameters"},
            "rope_theta": theta,
            "rope_scaling": config.get("rope_scaling") if scaled else None,
            "rms_norm_eps": config.get("rms_norm_eps", _EPSILON),
            "num_attention_heads": _heads(keys, kind),
        }
        common = read_mtp(ConfigReader(flat, keys.where), self.name, several=True)
        head_dim = keys.positive("head_dim", common["hidden_size"] // common["num_attention_heads"])
        if part not in (None, 0.5, 1):
            raise CheckpointError(
                keys.where,
                f"partial_rotary_factors: expected 0.5 or 1, got {part!r}",
                fix="engines serve no other: correct 'partial_rotary_factors'",
            )
        return MtpStepGeometry(
            **common | {"aux_layer_ids": (number - 1,)},
            target_layers=number,
            attention=GroupedAttention(
                num_key_value_heads=keys.positive("num_attention_groups"),
                head_dim=head_dim,
                rotary_dim=head_dim // 2 if part == 0.5 else head_dim,  # `step3p5.py:263`
                qk_norm=True,
                input_bias=keys.flag("attention_bias", False),
                gate="heads",
            ),
            window=keys.positive("sliding_window") if kind == _SLIDING else None,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        # Every module has its head; the embedding is shared.
        specs = dict(super().tensor_specs(geometry))
        for name, spec in super().tensor_specs(geometry).items():
            if spec.role == "head":
                specs[name] = TensorSpec(role="head", shape=spec.shape)
            elif spec.role == "embedding" and name.startswith("modules."):
                del specs[name]
        return specs

    @override
    def forward(self, geometry: Any, weights: Weights, on_input: OnInput) -> DraftForward:
        if geometry.num_layers == 1:
            raise CheckpointError(
                "num_nextn_predict_layers",
                f"1: of {self.name} only drafts of several modules can be replayed",
                fix="replay the modules that the target was released with",
            )
        return super().forward(geometry, weights, on_input)


def _same_in_all(keys: ConfigReader, values: Any, number: int, count: int, key: str) -> Any:
    """The one value that all modules have in a list over layers."""
    if values is None:
        return None
    whole = isinstance(values, list) and len(values) >= number + count
    if not whole:
        raise CheckpointError(
            keys.where,
            f"{key}: expected a list over {number} layers of the target and {count} of the draft",
            fix=f"correct {key!r}, num_hidden_layers or num_nextn_predict_layers",
        )
    first, *others = of_modules = values[number : number + count]
    same = all(other == first and type(other) is type(first) for other in others)
    if not same:
        raise CheckpointError(
            keys.where,
            f"{key}: expected the same of all modules, got {of_modules}",
            fix="modules that differ in kind are not supported",
        )
    return first


def _refuse_others(keys: ConfigReader, number: int, count: int) -> None:
    """Refuse experts, a limit of the activation, and layers without rope or gate."""
    experts = keys.config.get("moe_layers_enum")
    listed = experts.split(",") if isinstance(experts, str) else keys.items("moe_layers_enum")
    modules = range(number, number + count)
    limits, rope = keys.items("swiglu_limits_shared"), keys.items("use_rope_layers")
    mlp = keys.items("mlp_layer_types") + keys.items("mtp_mlp_layer_types")
    refused = {
        "moe_layers_enum": any(str(i) in {str(name).strip() for name in listed} for i in modules),
        "mlp_layer_types": "sparse" in mlp[number : number + count],
        "swiglu_limits_shared": any(limits[i] for i in modules if i < len(limits)),
        "use_rope_layers": not all(rope[i] for i in modules if i < len(rope)),
        "use_head_wise_attn_gate": keys.config.get("use_head_wise_attn_gate") is not True,
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise CheckpointError(
                keys.where,
                f"{key}: asks of the layers {modules.start} to {modules.stop - 1} what the released"
                " modules have not: rope, a gate of each head and a dense MLP without a limit",
                fix="use another draft: no family has these maths, to quantize or to replay it",
            )


def _heads(keys: ConfigReader, kind: str) -> int:
    """Query heads of layers of a kind: vLLM `step3p5.py:71`."""
    if kind == _SLIDING:
        if keys.config.get("num_sliding_attention_heads") is not None:
            return keys.positive("num_sliding_attention_heads")
        other = keys.section("attention_other_setting")
        if other.config.get("attention_type") == kind:
            return other.positive("num_attention_heads")
    return keys.positive("num_attention_heads")


FAMILY = Step3p5Mtp()
