"""DSpark in engines: a Markov head, which vLLM builds as a head, and the keys that each reads.

Sources: loading executed (`tests/engines/RESULTS.md`), whose error texts these are;
`qwen3_dspark.py` and `config/speculative.py:1535` of vLLM 0.33.0, `models/dspark.py` and
`dspark_config.py` of SGLang 0.5.23.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...architectures import declared_architecture
from ...engine_traits import (
    ExtraLinear,
    Finding,
    ServedDraft,
    Speculators,
    dropped_roots,
    refused_roots,
)
from ..dflash import engine_traits as dflash

_ARCHITECTURES = frozenset({"Qwen3DSparkModel", "DSparkDraftModel"})
_FLAT = ("confidence_proj.", "gate_proj.", "joint_proj.", "markov_w1.", "markov_w2.")
"""How ModelOpt's exports begin the names of the heads, in the order in which vLLM meets them."""
_SPECULATORS_KEYS = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "block_size",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_NO_NAME = "ValueError: There is no module or parameter named '{}' in {}."
_NO_HEAD = (
    "ValueError: Reduced-vocabulary Qwen3 DSpark checkpoints must include lm_head weights; the full"
    " target lm_head cannot be shared."
)
_NO_MAP = (
    "ValueError: Reduced-vocabulary Qwen3 DSpark checkpoints must include a d2t mapping so sampled"
    " draft ids can be converted to target ids."
)
_RENAME = "name the heads as SpecForge does: markov_head.markov_w1, confidence_head.proj"
_TOP = "write markov_rank, markov_head_type and the keys of the confidence head at the top level"
_GATES = {"gated": "gate_up_proj", "rnn": "joint_proj"}
"""Kind of a Markov head -> its linear, as vLLM's loader spells it."""


def _in_vllm(draft: ServedDraft) -> Finding | None:
    """Rules of `SpeculativeConfig`, `Qwen3DSparkModel` and its loader."""
    config = draft.config
    name, flat = declared_architecture(config), _flat(draft.tensor_names)
    if flat:
        where = "DFlashQwen3Model" if name == "DFlashDraftModel" else "Qwen3DSparkModel"
        return Finding("load", _NO_NAME.format(flat.rstrip("."), where), _RENAME)
    if name == "DFlashDraftModel":
        remedy = "set architectures to Qwen3DSparkModel"
        return Finding("load", _NO_NAME.format("confidence_head", "DFlashQwen3Model"), remedy)
    if name == "DSparkDraftModel" and config.get("model_type") != "qwen3":
        text = f"vLLM takes a draft of model_type {config.get('model_type')} for DeepSeek-V4's own"
        return Finding("unknown", text, "set architectures to Qwen3DSparkModel")
    if config.get("markov_rank") is None:
        text = "AttributeError: 'Qwen3Config' object has no attribute 'markov_rank'"
        return Finding("init", text, _TOP)
    if (kind := config.get("markov_head_type")) in tuple(_GATES):  # of any JSON type
        gate = f"markov_head.{_GATES[kind]}"
        return Finding("load", _NO_NAME.format(gate, "Qwen3DSparkModel"), "serve it with SGLang")
    return _cut(draft) or _other_confidence(draft)


def _cut(draft: ServedDraft) -> Finding | None:
    """A head of fewer rows than the vocabulary: `qwen3_dspark.py:342`."""
    own, names = draft.config.get("draft_vocab_size"), draft.tensor_names
    if own in (None, draft.config.get("vocab_size")):
        return None
    if not any("lm_head" in name for name in names):
        return Finding("load", _NO_HEAD, "store the rows of lm_head that d2t stands for")
    if not any("d2t" in name for name in names):
        return Finding("load", _NO_MAP, "export the draft with d2t")
    return None


def _other_confidence(draft: ServedDraft) -> Finding | None:
    """Without a key the confidence head reads no Markov embedding, which trainers let it do."""
    config = draft.config
    stored = "confidence_head.proj.weight" in draft.tensor_names
    if not (stored and config.get("enable_confidence_head")):
        return None
    if config.get("confidence_head_with_markov") is not None:
        return None
    width = config["hidden_size"]
    text = (
        "AssertionError: Tried to load weights of size torch.Size([1,"
        f" {width + config['markov_rank']}])to a parameter of size torch.Size([1, {width}])"
    )
    return Finding("load", text, "write confidence_head_with_markov: true")


def _in_sglang(draft: ServedDraft) -> Finding | None:
    """Rules of `parse_dspark_draft_config`, `build_markov_head` and the loader."""
    config = draft.config
    flat = _flat(draft.tensor_names)
    if declared_architecture(config) == "DFlashDraftModel" or flat:
        what = f"SGLang drops {flat or 'markov_head.'}*, without which the draft is another one"
        remedy = _RENAME if flat else "set architectures to Qwen3DSparkModel"
        return Finding("wrong", what, remedy)
    nested = config.get("dflash_config")
    keys = {**config, **(nested if isinstance(nested, Mapping) else {})}
    if keys.get("markov_head_type") is None:
        text = "ValueError: DSpark requires markov_head_type when markov_rank > 0, got None."
        return Finding("init", text, "write markov_head_type: vanilla")
    if config.get("markov_rank") is None:
        text = (
            "ValueError: DSpark requires markov_rank > 0 (the Markov head is the core of the"
            " semi-AR draft); got markov_rank=0."
        )
        return Finding("init", text, _TOP)
    own, vocab = config.get("draft_vocab_size") or draft.head_rows, config.get("vocab_size")
    if own not in (None, vocab):
        rank = config["markov_rank"]
        text = (
            f"AssertionError: Attempted to load weight (torch.Size([{own}, {rank}])) into parameter"
            f" (torch.Size([{vocab}, {rank}]))"
        )
        return Finding("load", text, "serve it with vLLM, or train it with the whole vocabulary")
    return None


def _flat(names: Iterable[str]) -> str:
    """The first beginning of ModelOpt's that one of the names has; "" = none."""
    own = tuple(names)
    return next((flat for flat in _FLAT if any(name.startswith(flat) for name in own)), "")


def _of_speculators(
    config: Mapping[str, Any], _layers: Mapping[str, Any]
) -> dict[str, Any] | Finding:
    ids = dflash.block_ids(config, "aux_hidden_state_layer_ids")
    if isinstance(ids, Finding):
        return ids
    kept = {key: config[key] for key in _SPECULATORS_KEYS if config.get(key) is not None}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": ids,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "sample_from_anchor": config.get("sample_from_anchor", False),
        **kept,
    }


_DFLASH = dflash.ENGINE_TRAITS
ENGINE_TRAITS = replace(
    _DFLASH,
    extra_linears=(
        # A ParallelLMHead in vLLM, `qwen3_dspark.py:70`; plain in SGLang, `dspark.py:179`.
        ExtraLinear("markov_head.markov_w2", is_head=True),
    ),
    module_names=(
        "markov_head",
        "confidence_head",
        r"markov_w\d",
        "gate_proj",
        "joint_proj",
        "confidence_proj",
    ),
    vllm=replace(
        _DFLASH.vllm,
        architectures=_ARCHITECTURES,
        served_as="dspark",
        problem=_in_vllm,
        roots=refused_roots(
            "Qwen3DSparkModel", "draft_model", "dflash_module", "model", "logit_head"
        ),
        head_declared="never",  # `qwen3_dspark.py:248`
        not_executed=frozenset({"Qwen3OmniDSparkModel"}),
        not_in_v1=_ARCHITECTURES,
        speculators={"dspark": Speculators(_of_speculators, qwen3=True)},
    ),
    sglang=replace(
        _DFLASH.sglang,
        architectures=_ARCHITECTURES | {"LingDSparkModel"},
        served_as="DSPARK",
        problem_as_draft=_in_sglang,
        roots=dropped_roots("draft_model.", "dflash_module.", "logit_head."),
        counts_anchor=True,  # `dspark_config.py:49`
    ),
    tensorrt_llm=replace(_DFLASH.tensorrt_llm, architectures=frozenset()),
)
