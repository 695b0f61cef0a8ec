"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3.

vLLM's `Eagle3Qwen3ForCausalLM` is the same with normed queries and keys. P-EAGLE is either with a
mask_hidden, and drafts all tokens of a step in one pass: `PEagleDraftModel` of SpecForge and
speculators, which vLLM 0.33 loads into the class of EAGLE-3 (`registry.py:698-706`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from .. import engine_traits as traits
from ..architectures import declared_architecture
from ..config_reader import KEY, SECTION, ConfigReader
from ..family import Dim, SpeculatorsForm, TensorSpec, Weights
from ..forward import OnInput
from ..geometry import needed_mask
from ..maths import Tensor
from ..shared import layers as decoder
from ..shared.eagle3 import Eagle3, Eagle3Forward, Eagle3Geometry, read_common

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM 0.33 looks for the mask token, in this order: `llm_base_proposer.py:361-372`."""
_OF_SPECULATORS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


def _in_vllm(draft: traits.ServedDraft) -> traits.Finding | None:
    parallel = any(name.endswith("mask_hidden") for name in draft.tensor_names)
    if parallel and all(draft.config.get(key) is None for key in MASK_KEYS):
        text = "ValueError: For parallel drafting, the draft model config must have"
        return traits.Finding(
            "init", f"{text} `dflash_config.mask_token_id`,", "add 'mask_token_id'"
        )
    slides = "sliding_attention" in (draft.config.get("layer_types") or ())
    if slides and "sliding_window" not in draft.config:  # `llama.py:205`
        text = "AttributeError: 'EAGLEConfig' object has no attribute 'sliding_window'"
        return traits.Finding("init", text, "add sliding_window, or correct layer_types")
    return None


def _eagle3_in_vllm(
    config: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any] | traits.Finding:
    model_type = layers.get("model_type", "llama")
    if model_type not in tuple(_OF_SPECULATORS):  # of any JSON type
        text = traits.INVALID.format(f"Unsupported model_type {model_type} for Eagle3 speculator")
        return traits.Finding("config", text, "serve a draft with layers of Llama or Qwen3")
    return {
        "architectures": [_OF_SPECULATORS[model_type]],
        "norm_before_residual": config.get("norm_before_residual", True),
        "norm_before_fc": config.get("norm_before_fc", False),
        "fc_norm": config.get("fc_norm", False),
        "norm_output": config.get("norm_output", False),
        KEY: config.get(KEY),
    }


def _peagle_in_vllm(
    config: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any] | traits.Finding:
    """`update_peagle`, whose names of architectures are those of EAGLE-3's classes."""
    if "mask_token_id" not in config:
        return traits.Finding(
            "config", "KeyError: 'mask_token_id'", "add it, as the draft was trained"
        )
    found = _eagle3_in_vllm(config, layers)
    if isinstance(found, traits.Finding):
        return found
    own = {key: value for key, value in found.items() if key not in ("fc_norm", "norm_output")}
    residual = config.get("norm_before_residual", False)
    return {**own, "norm_before_residual": residual, "pard_token": config["mask_token_id"]}


_IN_VLLM = frozenset({
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM",
})  # fmt: skip
ENGINE_TRAITS = traits.EngineTraits(
    usual_type="llama",
    norm_before_fc=True,
    two_layer_norms=True,
    prunes_vocabulary=True,
    vllm=traits.InVllm(
        architectures=_IN_VLLM,
        problem=_in_vllm,
        dropped=("input_norm.",),
        roots=traits.refused_roots("LlamaModel", "model", "draft_model", "eagle_module"),
        uneven_heads="AssertionError: vllm/model_executor/models/llama.py:145: assert"
        " self.total_num_heads % tp_size == 0",
        head_declared="always",  # `llama_eagle3.py:332`, `qwen3_eagle3.py:308`
        forgets_attention=True,
        fusion=traits.Fusion(),  # `llama_eagle3.py:209`
        normed_fusion=traits.Fusion(  # `qwen3_eagle3.py:202`
            counted_by=("num_aux_layers", "num_aux_hidden_states", KEY, f"{SECTION}.{KEY}")
        ),
        speculators={
            "eagle3": traits.Speculators(_eagle3_in_vllm),
            "peagle": traits.Speculators(_peagle_in_vllm),
        },
    ),
    sglang=traits.InSglang(
        architectures=frozenset({"LlamaForCausalLMEagle3"}),
        # `load_weights` tries a name as it is first.
        roots={"model.": None, **traits.dropped_roots("draft_model.", "eagle_module.")},
        uneven_heads="AssertionError: sglang/srt/models/llama.py:183: assert"
        " self.total_num_heads % tp_size == 0",
        old_norms=True,
        fusion=traits.Fusion(),  # `llama_eagle3.py:151`
        needs_draft_vocab_size=True,
    ),
    tensorrt_llm=traits.InTensorRtLlm(
        architectures=frozenset({"LlamaForCausalLMEagle3", "EAGLE3LlamaForCausalLM"}), read=True
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3LlamaGeometry(Eagle3Geometry):
    """Config of an EAGLE-3 Llama draft; widths in elements.

    Attributes:
        qk_norm: each head's query and key is normed before it is rotated, as in Qwen3 layers.
        parallel: P-EAGLE: all tokens of a step are drafted in one pass, those after the first from
            mask tokens beside a trained mask_hidden.
        windows: positions that a query of each layer sees, as vLLM serves it; None = all.
    """

    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False
    parallel: bool = False
    mask_token_id: int | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def window(self) -> int | None:
        """Of the first layer that has one; None where none has."""
        return next((window for window in self.windows if window is not None), None)

    @override
    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class PEagleForward(Eagle3Forward):
    """One P-EAGLE draft: EAGLE-3's layers, all tokens of a step in one pass.

    After the row of the last committed token stand K - 1 rows of the mask token, each at the next
    position, with what fc makes of mask_hidden in the place of features. Each sees the rows before
    it, so that the pass is a chain whose later steps read the mask, not what the step before gave.

    Source: `llm_base_proposer.py:355-384,1404-1416` and `utils.py:495-542` of vLLM 0.33's
    `v1/spec_decode`.
    """

    def __init__(
        self,
        geometry: Eagle3LlamaGeometry,
        weights: Weights,
        on_input: OnInput,
        attention: decoder.Attention,
    ) -> None:
        super().__init__(geometry, weights, on_input, attention)
        self.mask_token_id = needed_mask(geometry)

    @override
    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.fuse(self.weights["mask_hidden"].to(hidden.dtype))
        return token_ids.new_full(token_ids.shape, self.mask_token_id), mask.expand_as(hidden)


_EAGLE3_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def _eagle3(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    model_type = layers.config.get("model_type")
    if model_type not in tuple(_EAGLE3_ARCHITECTURES):
        known = " or ".join(repr(name) for name in _EAGLE3_ARCHITECTURES)
        raise layers.refused(
            f"model_type: expected {known}, got {model_type!r}",
            fix="EAGLE-3 in this layout has layers of these two kinds only",
        )
    norm_before_fc, fc_norm = keys.flag("norm_before_fc", False), keys.flag("fc_norm", False)
    if norm_before_fc and fc_norm:
        raise keys.refused(
            "norm_before_fc and fc_norm are both true, but exclude each other",
            fix="keep the one that the draft was trained with",
        )
    ids_key = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": [_EAGLE3_ARCHITECTURES[model_type]],
        # The package trains with false where the key is missing; vLLM serves true.
        "norm_before_residual": keys.flag("norm_before_residual", True),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": keys.flag("norm_output", False),
        "eagle_config": {ids_key: keys.after_layer(ids_key)},
    }


def _peagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """EAGLE-3 with a mask; vLLM serves norm_before_residual false where the key is missing."""
    spelled = _eagle3(keys, layers)
    (architecture,) = spelled["architectures"]
    qwen3 = architecture == _EAGLE3_ARCHITECTURES["qwen3"]
    return {
        **spelled,
        "architectures": ["PeagleQwen3ForCausalLM" if qwen3 else "PEagleDraftModel"],
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "mask_token_id": keys.config.get("mask_token_id"),
    }


_ATTENTIONS = ("full_attention", "sliding_attention")
_PARALLEL = ("PEagleDraftModel", "PeagleQwen3ForCausalLM")
_NORMED_HEADS = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")


class Eagle3Llama(Eagle3):
    """The EAGLE-3 Llama family with all its name variants."""

    name = "eagle3-llama"
    engine_traits = ENGINE_TRAITS
    speculators = {  # noqa: RUF012 - a constant of the class
        "eagle3": SpeculatorsForm(("Eagle3Speculator", "Eagle3DraftModel"), _eagle3),
        "peagle": SpeculatorsForm(("PEagleSpeculator", "PEagleDraftModel"), _peagle),
    }
    misnamed: Mapping[str, tuple[str, str]] = {}
    architectures = ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", *_PARALLEL)
    relatives: Mapping[str, str] = {
        mark: kind for mark, kind in Eagle3.relatives.items() if mark != "mask_hidden"
    }

    @override
    def recognises(self, canonical_names: Collection[str]) -> bool:
        # A hidden_norm in layer 0 and plain q_proj; DFlash has that norm outside the layers.
        return {"layers.0.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"} <= set(
            canonical_names
        )

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3LlamaGeometry:
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        name = declared_architecture(config)
        parallel = name in _PARALLEL
        if parallel and not common["fuses"]:
            raise keys.refused(
                "use_aux_hidden_state: expected true of a P-EAGLE draft, got false",
                fix="correct 'use_aux_hidden_state' of eagle_config",
            )
        return Eagle3LlamaGeometry(
            **common,
            **decoder.read_heads(keys, common),
            qk_norm=name in _NORMED_HEADS,
            parallel=parallel,
            mask_token_id=_mask_token_id(keys, common["vocab_size"]) if parallel else None,
            windows=_windows(keys, common["num_layers"]),
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        # P-EAGLE's mask stands in the place of target features.
        table = dict(super().tensor_specs(geometry))
        if geometry.parallel:
            features = Dim(
                geometry.num_aux_layers * geometry.target_hidden_size,
                "target_hidden_size x aux layer ids",
            )
            one = Dim(1, "one mask for all positions")
            table["mask_hidden"] = TensorSpec(role="mask", shape=(one, one, features))
        return table

    @override
    def forward(self, geometry: Any, weights: Weights, on_input: OnInput) -> Eagle3Forward:
        if geometry.window is not None:
            raise CheckpointError(
                "config.json",
                f"layer_types: replay does not compute sliding layers of EAGLE-3: vLLM 0.33 serves"
                f" a window of {geometry.window} positions, SGLang 0.5.23 all positions",
                fix="measure this draft on a server; if it was trained without a window, replay a"
                " copy whose layer_types are all full_attention",
            )
        maths = PEagleForward if geometry.parallel else Eagle3Forward
        return maths(geometry, weights, on_input, self.attention(geometry))

    @override
    def attention_shapes(self, geometry: Eagle3LlamaGeometry, width: Dim) -> decoder.Shapes:
        shapes = decoder.grouped_shapes(geometry, width)
        return shapes | decoder.head_norm_shapes(geometry) if geometry.qk_norm else shapes

    @override
    def attention(self, geometry: Eagle3LlamaGeometry) -> decoder.LlamaAttention:
        return decoder.LlamaAttention(geometry)


def _windows(keys: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer; () = all layers see all positions.

    Source: vLLM 0.33 `llama.py:189-207`, whose layer is not sliding without a sliding_window;
    `llama_eagle3.py` of SGLang 0.5.23 reads neither key.
    """
    types = keys.config.get("layer_types") or []
    if not isinstance(types, list) or any(kind not in _ATTENTIONS for kind in types):
        raise keys.refused(
            f"layer_types: expected {' or '.join(_ATTENTIONS)} for every layer, got {types!r}",
            fix="correct 'layer_types': the layers are those of Llama",
        )
    if _ATTENTIONS[1] not in types or keys.config.get("sliding_window") is None:
        return ()
    window = keys.positive("sliding_window")
    slides = [kind == _ATTENTIONS[1] for kind in (*types, *[""] * num_layers)]
    return tuple(window if slides[i] else None for i in range(num_layers))


def _mask_token_id(keys: ConfigReader, vocab_size: int) -> int | None:
    """Only replay needs it, so that its absence is no error before."""
    key = next((key for key in MASK_KEYS if keys.config.get(key) is not None), None)
    value = keys.config[key] if key else None
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise keys.wrong(str(key), f"a token of the vocabulary of {vocab_size}", value)
    return value


FAMILY = Eagle3Llama()
