"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3.

vLLM's `Eagle3Qwen3ForCausalLM` is the same with normed queries and keys. P-EAGLE is either of them
with a mask_hidden, and drafts all tokens of a step in one pass: `PEagleDraftModel` of SpecForge and
speculators, which vLLM 0.33 loads into the class of EAGLE-3 (`registry.py:698-706`).
"""

from collections.abc import Mapping
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
_OF_SPECULATORS: Mapping[Any, str] = {
    "llama": "Eagle3LlamaForCausalLM",
    "qwen3": "Eagle3Qwen3ForCausalLM",
}
"""model_type of the layers of a draft from speculators -> its architecture, for vLLM and for us."""
_FLAGS = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Key of speculators -> vLLM's value where it is missing; the package itself trains with false."""


def _in_vllm(draft: traits.ServedDraft) -> traits.Finding | None:
    parallel = any(name.endswith("mask_hidden") for name in draft.tensor_names)
    if parallel and all(draft.config.get(key) is None for key in MASK_KEYS):
        return traits.Finding(
            "init",
            "ValueError: For parallel drafting, the draft model config must have"
            " `dflash_config.mask_token_id`,",
            "add 'mask_token_id'",
        )
    slides = "sliding_attention" in (draft.config.get("layer_types") or ())
    whole = slides and "sliding_window" not in draft.config
    if not whole:
        return None
    # `llama.py:205`
    return traits.Finding(
        "init",
        "AttributeError: 'EAGLEConfig' object has no attribute 'sliding_window'",
        "add sliding_window, or correct layer_types",
    )


def _eagle3_in_vllm(config: Mapping[str, Any], layers: Mapping[str, Any]) -> traits.ConfigRead:
    model_type = layers.get("model_type", "llama")
    if model_type not in tuple(_OF_SPECULATORS):  # of any JSON type
        return traits.Finding(
            "config",
            "ValidationError: 1 validation error for SpeculativeConfig Value error, Unsupported"
            f" model_type {model_type} for Eagle3 speculator",
            "serve a draft with layers of Llama or Qwen3",
        )
    return {
        "architectures": [_OF_SPECULATORS[model_type]],
        **{key: config.get(key, usual) for key, usual in _FLAGS.items()},
        KEY: config.get(KEY),
    }


def _peagle_in_vllm(config: Mapping[str, Any], layers: Mapping[str, Any]) -> traits.ConfigRead:
    """`update_peagle`, whose names of architectures are those of EAGLE-3's classes."""
    if "mask_token_id" not in config:
        return traits.Finding(
            "config",
            "KeyError: 'mask_token_id'",
            "add it, as the draft was trained",
        )
    read = _eagle3_in_vllm(config, layers)
    if isinstance(read, traits.Finding):
        return read
    kept = {key: value for key, value in read.items() if key not in ("fc_norm", "norm_output")}
    residual = config.get("norm_before_residual", False)
    return {**kept, "norm_before_residual": residual, "pard_token": config["mask_token_id"]}


_IN_VLLM = frozenset({
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM",
})  # fmt: skip
ENGINE_TRAITS = traits.EngineTraits(
    usual_type="llama",
    norm_before_fc=True,
    prunes_vocabulary=True,
    vllm=traits.InVllm(
        architectures=_IN_VLLM,
        problem=_in_vllm,
        roots=traits.refused_roots("LlamaModel", "model", "draft_model", "eagle_module"),
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
        # `load_weights` first tries a name as it is.
        roots={"model.": None, **traits.dropped_roots("draft_model.", "eagle_module.")},
        fusion=traits.Fusion(),  # `llama_eagle3.py:151`
        needs_draft_vocab_size=True,
    ),
    tensorrt_llm=traits.InTensorRtLlm(
        architectures=frozenset({"LlamaForCausalLMEagle3", "EAGLE3LlamaForCausalLM"}), read=True
    ),
)


class PEagleForward(Eagle3Forward):
    """One P-EAGLE draft: EAGLE-3's layers, all tokens of a step in one pass.

    After the row of the last committed token come K - 1 rows of the mask token, each at the next
    position, with fc's output for mask_hidden instead of features. Each sees the rows before
    it, so the pass is a chain whose later steps read the mask, not the output of the previous step.

    Source: `llm_base_proposer.py:355-384,1404-1416` and `utils.py:495-542` of vLLM 0.33's
    `v1/spec_decode`.
    """

    def __init__(self, geometry: Eagle3Geometry, weights: Weights, on_input: OnInput) -> None:
        super().__init__(geometry, weights, on_input)
        self.mask_token_id = needed_mask(geometry)

    @override
    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.fuse(self.weights["mask_hidden"].to(hidden.dtype))
        return token_ids.new_full(token_ids.shape, self.mask_token_id), mask.expand_as(hidden)


def _eagle3(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    model_type = layers.config.get("model_type")
    known, fits = " or ".join(map(repr, _OF_SPECULATORS)), tuple(_OF_SPECULATORS)
    if model_type not in fits:
        raise CheckpointError(
            layers.where,
            f"model_type: expected {known}, got {model_type!r}",
            fix="EAGLE-3 in this layout has layers of these two kinds only",
        )
    flags = {key: keys.flag(key, usual) for key, usual in _FLAGS.items()}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(
            keys.where,
            "norm_before_fc and fc_norm are both true, but exclude each other",
            fix="keep the one that the draft was trained with",
        )
    return {
        "architectures": [_OF_SPECULATORS[model_type]],
        **flags,
        SECTION: {KEY: keys.after_layer(KEY)},
    }


def _peagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """EAGLE-3 with a mask; vLLM serves norm_before_residual false where the key is missing."""
    spelled, qwen3 = _eagle3(keys, layers), layers.config["model_type"] == "qwen3"
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
    # DFlash has the norm outside the layers.
    marks = frozenset({"layers.0.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"})
    relatives: Mapping[str, str] = {
        mark: kind for mark, kind in Eagle3.relatives.items() if mark != "mask_hidden"
    }

    @override
    def geometry(self, keys: ConfigReader) -> Eagle3Geometry:
        common = read_common(keys, self.name)
        name = declared_architecture(keys.config)
        parallel = name in _PARALLEL
        if not (common["fuses"]) and parallel:
            raise CheckpointError(
                keys.where,
                "use_aux_hidden_state: expected true of a P-EAGLE draft, got false",
                fix="correct 'use_aux_hidden_state' of eagle_config",
            )
        return Eagle3Geometry(
            **common,
            attention=decoder.read_heads(keys, common, qk_norm=name in _NORMED_HEADS),
            parallel=parallel,
            mask_token_id=_mask_token_id(keys, common["vocab_size"]) if parallel else None,
            windows=_windows(keys, common["num_layers"]),
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        # P-EAGLE's mask replaces target features.
        table = dict(super().tensor_specs(geometry))
        if geometry.parallel:
            single, (_, features) = Dim(1, "one mask for all positions"), table["fc.weight"].shape
            table["mask_hidden"] = TensorSpec(role="mask", shape=(single, single, features))
        return table

    @override
    def forward(self, geometry: Any, weights: Weights, on_input: OnInput) -> Eagle3Forward:
        window = next(filter(None, geometry.windows), None)
        if window is not None:
            raise CheckpointError(
                "config.json",
                "layer_types: replay does not compute sliding layers of EAGLE-3: vLLM 0.33 serves"
                f" a window of {window} positions, SGLang 0.5.23 all positions",
                fix="measure this draft on a server; if it was trained without a window, replay a"
                " copy whose layer_types are all full_attention",
            )
        maths = PEagleForward if geometry.parallel else Eagle3Forward
        return maths(geometry, weights, on_input)


def _windows(keys: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; () = all layers see all positions.

    Source: vLLM 0.33 `llama.py:189-207`, whose layers do not slide without a sliding_window;
    `llama_eagle3.py` of SGLang 0.5.23 reads neither key.
    """
    types = keys.config.get("layer_types") or []
    fits = isinstance(types, list) and all(kind in _ATTENTIONS for kind in types)
    if not fits:
        raise CheckpointError(
            keys.where,
            f"layer_types: expected {' or '.join(_ATTENTIONS)} for every layer, got {types!r}",
            fix="correct 'layer_types': the layers are those of Llama",
        )
    if _ATTENTIONS[1] not in types or keys.config.get("sliding_window") is None:
        return ()
    window = keys.positive("sliding_window")
    slides = [kind == _ATTENTIONS[1] for kind in (*types, *[""] * num_layers)]
    return tuple(window if slides[i] else None for i in range(num_layers))


def _mask_token_id(keys: ConfigReader, vocab_size: int) -> int | None:
    """Only replay needs it, so its absence is no error before that."""
    key = next((key for key in MASK_KEYS if keys.config.get(key) is not None), None)
    value = keys.config[key] if key else None
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise keys.wrong(str(key), f"a token of the vocabulary of {vocab_size}", value)
    return value


FAMILY = Eagle3Llama()
