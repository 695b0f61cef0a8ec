"""DSpark: a DFlash draft whose logits are corrected by the token before each of them.

Sources: `qwen3_dspark.py` of vLLM 0.33, which builds Markov heads of the kind "vanilla" alone;
`models/dspark.py` of SGLang 0.5.23; exports of SpecForge, ModelOpt and DeepSpec. Drafts of this
name with other bodies (DeepSeek-V4, Gemma 4, Kimi K3's latent attention, MiniMax, LFM2, Muse) are
others, which `other_kinds` names.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .....recipes.errors import CheckpointError
from .....recipes.regular_file import MASK_EMBEDDING_FILE
from ...config_reader import ConfigReader, Served
from ...family import Dim, Draft, Lint, TensorSpec
from ..dflash.names import DFlash
from .engine_traits import ENGINE_TRAITS
from .geometry import MARKOV_HEADS, DSparkGeometry
from .speculators_form import FORMS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import BlockForward

_SECTION = "dflash_config"
_OF_OTHERS = ("sample_from_anchor", "shift_label", "projector_type", "markov_rank")
"""Keys of which DFlash refuses what DSpark has."""
_OWN_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head")
_PREFIXED = ("block_size", "markov_rank", "markov_head_type", "target_layer_ids")


class DSpark(DFlash):
    """The DSpark family with all its name variants."""

    name = "dspark"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    projectors: Mapping[str, str] = {"dspark": "DSparkDraftModel"}
    architectures = ("Qwen3DSparkModel", "DSparkDraftModel", "Qwen3OmniDSparkModel")
    prefixes = (
        *DFlash.prefixes,
        ("logit_head.", ""),  # SpecForge, in its early exports
        # ModelOpt; its gate_proj no exclude could tell from those of layers.
        ("markov_w1.", "markov_head.markov_w1."),
        ("markov_w2.", "markov_head.markov_w2."),
        ("joint_proj.", "markov_head.joint_proj."),
        ("confidence_proj.", "confidence_head.proj."),
    )
    served: Served = {  # noqa: RUF012 - a constant of the class
        **{key: value for key, value in DFlash.served.items() if key not in _OF_OTHERS},
        "projector_type": ("dspark", "a draft of another kind"),
        "dspark_config": (None, "SGLang alone reads it, not the keys beside it"),
        "dspark_draft_topk": (None, "vLLM corrects that many tokens and rules all others out"),
        "logit_scale": (1, "vLLM alone multiplies the logits by it"),
    }

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> DSparkGeometry:
        keys = ConfigReader(config, where)
        options = self.options(config, where)
        _check_agreement(keys, options)
        options.positive("block_size")  # SGLang drafts 7 tokens without it, vLLM refuses
        common = self.common_keys(config, where)
        rank = options.positive("markov_rank")
        kind = options.config.get("markov_head_type")
        kind = "vanilla" if kind is None else kind
        if kind not in MARKOV_HEADS:
            raise CheckpointError(
                where,
                f"markov_head_type: expected {', '.join(MARKOV_HEADS)}, got {kind!r}",
                fix="correct 'markov_head_type'; a draft with another head is not supported",
            )
        with_markov = options.flag("confidence_head_with_markov", True)
        return DSparkGeometry(
            **common,
            proposes_from_anchor=_proposes_from_anchor(keys, options),
            markov_rank=rank,
            markov_head_type=kind,
            confidence_width=common["hidden_size"] + (rank if with_markov else 0),
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DSparkGeometry = geometry
        rank, vocab = Dim(g.markov_rank, "markov_rank"), Dim(g.vocab_size, "vocab_size")
        draft_vocab = Dim(g.draft_vocab_size, "draft_vocab_size")
        confidence = Dim(g.confidence_width, "hidden_size, confidence_head_with_markov")
        one = Dim(1, "the confidence head")
        return {
            **super().tensor_specs(g),
            "markov_head.markov_w1.weight": TensorSpec(role="proposal", shape=(vocab, rank)),
            "markov_head.markov_w2.weight": TensorSpec(role="proposal", shape=(draft_vocab, rank)),
            **_gates(g),
            "confidence_head.proj.weight": TensorSpec(
                role="proposal", shape=(one, confidence), optional=True
            ),
            "confidence_head.proj.bias": TensorSpec(role="proposal", shape=(one,), optional=True),
        }

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "BlockForward":
        from .forward import DSparkForward

        return DSparkForward(geometry, weights, on_input)

    @override
    def side_weights(self, _geometry: Any, folder: Path) -> "Mapping[str, torch.Tensor]":
        # None, for engines look for the file beside DFlash alone. Source: vLLM 0.33
        # `qwen3_dspark.py` `load_weights`; SGLang 0.5.23 `dflash_worker_v2.py:543`.
        path = folder / MASK_EMBEDDING_FILE
        if path.exists():
            raise CheckpointError(
                path,
                "a trained mask embedding, which no engine reads beside a DSpark draft",
                fix="remove the file: the row of the embedding is served",
            )
        return {}


def _gates(g: DSparkGeometry) -> Mapping[str, TensorSpec]:
    """What the kinds of Markov heads have besides."""
    shapes = {
        "vanilla": None,
        "gated": ("gate_proj", g.markov_rank, g.hidden_size + g.markov_rank),
        "rnn": ("joint_proj", 3 * g.markov_rank, g.hidden_size + 2 * g.markov_rank),
    }
    shape = shapes[g.markov_head_type]
    if shape is None:
        return {}
    name, rows, columns = shape
    out = Dim(rows, "markov_rank, markov_head_type")
    inputs = Dim(columns, "hidden_size, markov_rank, markov_head_type")
    return {
        f"markov_head.{name}.weight": TensorSpec(role="proposal", shape=(out, inputs)),
        f"markov_head.{name}.bias": TensorSpec(role="proposal", shape=(out,)),
    }


def _proposes_from_anchor(keys: ConfigReader, options: ConfigReader) -> bool:
    """`sample_from_anchor`, true unless it is said otherwise.

    Source: vLLM 0.33 `dspark/speculator.py:50`, SGLang 0.5.23 `dspark_config.py:28`.
    """
    anchor = keys.flag("sample_from_anchor", True)
    said = {
        "dflash_config.sample_from_anchor": options.flag("sample_from_anchor", anchor),
        "shift_label": options.flag("shift_label", anchor),  # ModelOpt's word for it
        "dspark_bonus_anchor": not keys.flag("dspark_bonus_anchor", not anchor),  # vLLM's
    }
    for key, value in said.items():
        if value != anchor:
            raise CheckpointError(
                keys.where,
                f"sample_from_anchor: {anchor} at the top level, where engines read it, but"
                f" {key} says {value}",
                fix="write sample_from_anchor there as the draft was trained, and drop the other",
            )
    return anchor


def _check_agreement(keys: ConfigReader, options: ConfigReader) -> None:
    """What stands in two places says the same in both: engines differ in which they read."""
    pairs = [
        *((key, f"{_SECTION}.{key}", keys.section(_SECTION).config.get(key)) for key in _OWN_KEYS),
        *((key, f"dspark_{key}", keys.config.get(f"dspark_{key}")) for key in _PREFIXED),
        ("mask_token_id", "dspark_noise_token_id", keys.config.get("dspark_noise_token_id")),
    ]
    for key, other, value in pairs:
        own = keys.config.get(key) if other.startswith(_SECTION) else options.config.get(key)
        if value is not None and own is not None and own != value:
            raise CheckpointError(
                keys.where,
                f"{key}: {own!r} beside {other}: {value!r}, and engines differ in which they read",
                fix="write what the draft was trained with in both places",
            )


FAMILY = DSpark()
