"""DSpark: a DFlash draft whose logits are corrected by the preceding token.

Sources: `qwen3_dspark.py`, `spec_decode/dspark/speculator.py` and `config/speculative.py:1535` of
vLLM 0.33.0, which builds only Markov heads of the kind "vanilla", that of all published drafts;
`models/dspark.py` and `dspark_config.py` of SGLang 0.5.23; SpecForge `modeling/draft/dspark.py`;
exports of SpecForge, ModelOpt and DeepSpec. Loading was executed
(`experiments/engines/RESULTS.md`), whose error texts these are. Drafts of this name with other
bodies (DeepSeek-V4, Gemma 4, MiniMax, LFM2, Muse) are different kinds, which `architectures` names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ....recipes.regular_file import MASK_EMBEDDING_FILE
from .. import engine_traits as traits
from ..architectures import declared_architecture
from ..config_reader import ConfigReader, Served, object_at
from ..family import Dim, Draft, Lint, SpeculatorsForm, TensorSpec, Weights, told
from ..maths import Product, Tensor, embedding, torch
from ..shared.block_layers import DFlashForward, DFlashGeometry
from ..shared.layers import dims
from . import dflash
from .dflash import DFlash, block_keys

_ARCHITECTURES = frozenset({"Qwen3DSparkModel", "DSparkDraftModel"})
_FLAT = ("confidence_proj.", "markov_w1.", "markov_w2.")
"""Prefixes of the heads' names in ModelOpt's exports, in the order in which vLLM meets them."""
_HEAD_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
_SPECULATORS_KEYS = ("mask_token_id", "block_size", *_HEAD_KEYS)
_HEAD = "markov_head."
_CORRECTION = f"{_HEAD}markov_w2"
_MODULES = ("markov_head", "confidence_head", r"markov_w\d", "confidence_proj")


def _in_vllm(draft: traits.ServedDraft) -> traits.Finding | None:
    """Rules of `SpeculativeConfig`, `Qwen3DSparkModel` and its loader."""
    config = draft.config
    name, flat = declared_architecture(config), _flat(draft.tensor_names)
    if flat:
        return traits.Finding(
            "load",
            f"ValueError: There is no module or parameter named '{flat.rstrip('.')}' in"
            " Qwen3DSparkModel.",
            "name the heads as SpecForge does: markov_head.markov_w1, confidence_head.proj",
        )
    if name == "DSparkDraftModel" and config.get("model_type") != "qwen3":
        return traits.Finding(
            "unknown",
            f"vLLM takes a draft of model_type {config.get('model_type')} for DeepSeek-V4's own",
            "set architectures to Qwen3DSparkModel",
        )
    if config.get("markov_rank") is None:
        return traits.Finding(
            "init",
            "AttributeError: 'Qwen3Config' object has no attribute 'markov_rank'",
            "write markov_rank, markov_head_type and the keys of the confidence head at the top"
            " level",
        )
    return _cut(draft) or other_confidence(draft)


def _cut(draft: traits.ServedDraft) -> traits.Finding | None:
    """A head with fewer rows than the vocabulary: `qwen3_dspark.py:342`."""
    head_rows, names = draft.config.get("draft_vocab_size"), draft.tensor_names
    if head_rows in (None, draft.config.get("vocab_size")):
        return None
    if not any("lm_head" in name for name in names):
        return traits.Finding(
            "load",
            "ValueError: Reduced-vocabulary Qwen3 DSpark checkpoints must include lm_head weights;"
            " the full target lm_head cannot be shared.",
            "store the rows of lm_head that d2t stands for",
        )
    if any("d2t" in name for name in names):
        return None
    return traits.Finding(
        "load",
        "ValueError: Reduced-vocabulary Qwen3 DSpark checkpoints must include a d2t mapping so"
        " sampled draft ids can be converted to target ids.",
        "export the draft with d2t",
    )


def other_confidence(draft: traits.ServedDraft) -> traits.Finding | None:
    """Without a key the confidence head reads no Markov embedding, though trainers let it."""
    config = draft.config
    stored = "confidence_head.proj.weight" in draft.tensor_names
    declared = config.get("confidence_head_with_markov") is not None
    if declared or not (stored and config.get("enable_confidence_head")):
        return None
    width, rank = config["hidden_size"], config["markov_rank"]
    return traits.Finding(
        "load",
        f"AssertionError: Tried to load weights of size torch.Size([1, {width + rank}])to a"
        f" parameter of size torch.Size([1, {width}])",
        "write confidence_head_with_markov: true",
    )


def _in_sglang(draft: traits.ServedDraft) -> traits.Finding | None:
    """Rules of `parse_dspark_draft_config`, `build_markov_head` and the loader."""
    config = draft.config
    if flat := _flat(draft.tensor_names):
        return traits.Finding(
            "wrong",
            f"SGLang drops {flat}*, without which the draft is another one",
            "name the heads as SpecForge does: markov_head.markov_w1, confidence_head.proj",
        )
    keys = {**config, **object_at(config, "dflash_config")}
    if keys.get("markov_head_type") is None:
        return traits.Finding(
            "init",
            "ValueError: DSpark requires markov_head_type when markov_rank > 0, got None.",
            "write markov_head_type: vanilla",
        )
    if config.get("markov_rank") is None:
        return traits.Finding(
            "init",
            "ValueError: DSpark requires markov_rank > 0 (the Markov head is the core of the"
            " semi-AR draft); got markov_rank=0.",
            "write markov_rank, markov_head_type and the keys of the confidence head at the top"
            " level",
        )
    rows, vocab = config.get("draft_vocab_size") or draft.head_rows, config.get("vocab_size")
    if rows not in (None, vocab):
        rank = config["markov_rank"]
        return traits.Finding(
            "load",
            f"AssertionError: Attempted to load weight (torch.Size([{rows}, {rank}])) into"
            f" parameter (torch.Size([{vocab}, {rank}]))",
            "serve it with vLLM, or train it with the whole vocabulary",
        )
    return dflash.in_sglang(draft)


def _flat(names: Iterable[str]) -> str:
    """The first ModelOpt prefix that a name has."""
    all_names = tuple(names)
    return next((flat for flat in _FLAT if any(name.startswith(flat) for name in all_names)), "")


def _read_in_vllm(config: Mapping[str, Any], _layers: Mapping[str, Any]) -> traits.ConfigRead:
    ids = dflash.block_ids(config, "aux_hidden_state_layer_ids")
    if isinstance(ids, traits.Finding):
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
        traits.ExtraLinear(_CORRECTION, is_head=True),
    ),
    module_names=_MODULES,
    vllm=replace(
        _DFLASH.vllm,
        architectures=_ARCHITECTURES,
        as_another={
            "DFlashDraftModel": traits.Finding(
                "load",
                "ValueError: There is no module or parameter named 'markov_w1' in"
                " DFlashQwen3Model.",
                "set architectures to Qwen3DSparkModel",
            )
        },
        served_as="dspark",
        problem=_in_vllm,
        roots=traits.refused_roots(
            "Qwen3DSparkModel", "draft_model", "dflash_module", "model", "logit_head"
        ),
        head_declared="never",  # `qwen3_dspark.py:248`
        not_executed=frozenset({"Qwen3OmniDSparkModel"}),
        speculators={"dspark": traits.Speculators(_read_in_vllm, qwen3=True)},
    ),
    sglang=replace(
        _DFLASH.sglang,
        architectures=_ARCHITECTURES | {"LingDSparkModel"},
        as_another={
            "DFlashDraftModel": traits.Finding(
                "wrong",
                "SGLang takes it for a DFlash draft, and drops its Markov head",
                "set architectures to Qwen3DSparkModel",
            )
        },
        served_as="DSPARK",
        problem=_in_sglang,
        roots=traits.dropped_roots("draft_model.", "dflash_module.", "logit_head."),
        counts_anchor=True,  # `dspark_config.py:49`
    ),
    tensorrt_llm=replace(_DFLASH.tensorrt_llm, architectures=frozenset()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkGeometry(DFlashGeometry):
    """Config of a DSpark draft: a DFlash body, a Markov head, perhaps a confidence head.

    `markov_rank` is the width r of the preceding token's embedding, `confidence_width` the inputs
    of the confidence head: the hidden state and perhaps r more.
    """

    markov_rank: int
    confidence_width: int


class DSparkForward(DFlashForward):
    """One DSpark draft.

    With h_j the normed hidden state that proposes token j, and e_j the row of markov_w1 for the
    token before it, logits_j = lm_head h_j + markov_w2 e_j.
    The confidence head shortens steps in engines that are told to; it changes no proposal.
    """

    geometry: DSparkGeometry

    @override
    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        # [h_j; e_j], [A, K, W + r].
        h = self.norm("norm", super().proposing(x, token_ids))
        e = embedding(token_ids[:, :-1], self.weights[f"{_HEAD}markov_w1.weight"], h.dtype)
        return torch.cat((h, self.on_input(_CORRECTION, e)), dim=-1)

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        corrections = hidden[..., self.geometry.hidden_size :]
        head = self.weights[f"{_CORRECTION}.weight"]
        return [*super().products(hidden), (corrections, head)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        # The input is normed already.
        return self.on_input("lm_head", hidden[..., : self.geometry.hidden_size])


def nested_keys(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM 0.33 `qwen3_dspark.py:212`, SGLang 0.5.23 `dspark.py:384`, both executed.

    SpecForge trains from this file, and its export moves the keys
    (`scripts/gates/normalize_dflash_export.py`).
    """
    config = draft.checkpoint.config
    nested = config.get("dflash_config") or {}
    moved = {key: nested[key] for key in _HEAD_KEYS if key in nested and config.get(key) is None}
    if moved:
        yield told("dspark-keys-nested", moved, keys=", ".join(moved))


def _spelled(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dspark`; the package itself trains and saves `sample_from_anchor` true."""
    names = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {
        "architectures": ["Qwen3DSparkModel"],
        **block_keys(keys),
        **keys.positives("markov_rank"),
        **{name: keys.config[name] for name in names if keys.config.get(name) is not None},
        "sample_from_anchor": keys.flag("sample_from_anchor", False),
    }


_SECTION = "dflash_config"
_OF_OTHERS = ("sample_from_anchor", "shift_label", "projector_type", "markov_rank")
"""Keys that DFlash refuses and DSpark has."""
_OWN_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head")
_PREFIXED = ("block_size", "markov_rank", "markov_head_type", "target_layer_ids")


class DSpark(DFlash):
    """The DSpark family with all its name variants."""

    name = "dspark"
    engine_traits = ENGINE_TRAITS
    speculators: Mapping[str, SpeculatorsForm] = {
        "dspark": SpeculatorsForm(("DSparkSpeculator", "DSparkDraftModel"), _spelled)
    }
    projectors: Mapping[str, str] = {"dspark": "DSparkDraftModel"}
    architectures: tuple[str, ...] = (
        "Qwen3DSparkModel",
        "DSparkDraftModel",
        "Qwen3OmniDSparkModel",
    )
    prefixes = (
        *DFlash.prefixes,
        ("logit_head.", ""),  # SpecForge, in its early exports
        # ModelOpt
        ("markov_w1.", "markov_head.markov_w1."),
        ("markov_w2.", "markov_head.markov_w2."),
        ("confidence_proj.", "confidence_head.proj."),
    )
    served: Served = {  # noqa: RUF012 - a constant of the class
        **{key: value for key, value in DFlash.served.items() if key not in _OF_OTHERS},
        "projector_type": ("dspark", "a draft of another kind"),
        "markov_head_type": ("vanilla", "a Markov head that vLLM does not build"),
        "dspark_config": (None, "SGLang alone reads it, not the keys beside it"),
        "dspark_draft_topk": (None, "vLLM corrects that many tokens and rules all others out"),
        "logit_scale": (1, "vLLM alone multiplies the logits by it"),
    }
    lints = (*DFlash.lints, nested_keys)
    maths = DSparkForward

    @override
    def geometry(self, keys: ConfigReader) -> DSparkGeometry:
        options = self.options(keys)
        _check_agreement(keys, options)
        options.positive("block_size")  # SGLang drafts 7 tokens without it, vLLM refuses
        common = self.common_keys(keys)
        rank = options.positive("markov_rank")
        with_markov = options.flag("confidence_head_with_markov", True)
        return DSparkGeometry(
            **common,
            proposes_from_anchor=_proposes_from_anchor(keys, options),
            markov_rank=rank,
            confidence_width=common["hidden_size"] + (rank if with_markov else 0),
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DSparkGeometry = geometry
        rank, vocab, rows = dims(g, "markov_rank", "vocab_size", "draft_vocab_size")
        single = Dim(1, "the confidence head")
        width = Dim(g.confidence_width, "hidden_size, confidence_head_with_markov")
        shapes: dict[str, tuple[Dim, ...]] = {
            "markov_head.markov_w1.weight": (vocab, rank),
            f"{_CORRECTION}.weight": (rows, rank),
            "confidence_head.proj.weight": (single, width),
            "confidence_head.proj.bias": (single,),
        }
        return {
            **super().tensor_specs(g),
            **{
                name: TensorSpec(
                    role="correction" if name.startswith(_CORRECTION) else "proposal",
                    shape=shape,
                    optional="confidence" in name,
                )
                for name, shape in shapes.items()
            },
        }

    @override
    def side_weights(self, _geometry: Any, folder: Path) -> Weights:
        # None, since engines look for the file only beside DFlash. Source: vLLM 0.33
        # `qwen3_dspark.py` `load_weights`; SGLang 0.5.23 `dflash_worker_v2.py:543`.
        path = folder / MASK_EMBEDDING_FILE
        if path.exists():
            raise CheckpointError(
                path,
                "a trained mask embedding, which no engine reads beside a DSpark draft",
                fix="remove the file: the row of the embedding is served",
            )
        return {}


def _proposes_from_anchor(keys: ConfigReader, options: ConfigReader) -> bool:
    """Source: vLLM 0.33 `dspark/speculator.py:50`, SGLang 0.5.23 `dspark_config.py:28`."""
    anchor = keys.flag("sample_from_anchor", True)
    declared = {
        "dflash_config.sample_from_anchor": options.flag("sample_from_anchor", anchor),
        "shift_label": options.flag("shift_label", anchor),  # ModelOpt's word for it
        "dspark_bonus_anchor": not keys.flag("dspark_bonus_anchor", not anchor),  # vLLM's
    }
    for key, value in declared.items():
        if value != anchor:
            raise CheckpointError(
                keys.where,
                f"sample_from_anchor: {anchor} at the top level, where engines read it, but {key}"
                f" says {value}",
                fix="write sample_from_anchor there as the draft was trained, and drop the other",
            )
    return anchor


def _check_agreement(keys: ConfigReader, options: ConfigReader) -> None:
    """Keys in two places must have equal values: engines differ in which they read."""
    pairs = [
        *((key, f"{_SECTION}.{key}", keys.section(_SECTION).config.get(key)) for key in _OWN_KEYS),
        *((key, f"dspark_{key}", keys.config.get(f"dspark_{key}")) for key in _PREFIXED),
        ("mask_token_id", "dspark_noise_token_id", keys.config.get("dspark_noise_token_id")),
    ]
    for key, other, value in pairs:
        here = keys.config.get(key) if other.startswith(_SECTION) else options.config.get(key)
        agree = value is None or here is None or here == value
        if not agree:
            raise CheckpointError(
                keys.where,
                f"{key}: {here!r} beside {other}: {value!r}, and engines differ in which they read",
                fix="write what the draft was trained with in both places",
            )


FAMILY = DSpark()
