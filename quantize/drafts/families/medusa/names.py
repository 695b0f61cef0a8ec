"""Medusa: heads that propose a token each from the target's last hidden state.

A head is some residual blocks, a square linear each, and an lm_head of its own or the one that all
share. Names are those of vLLM, of FasterDecoding (`0.0.linear.weight`, head 0's lm_head being
`0.1.weight` behind one block) and of ModelOpt and TensorRT-LLM (`medusa_heads.0.lm_head.weight`).

Sources: `models/medusa.py` and `configs/medusa.py` of vLLM 0.32; vLLM 0.33 and SGLang 0.5.23 have
no Medusa. `medusa/model/medusa_model.py` of FasterDecoding/Medusa @e2a5d20.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ....errors import CheckpointError
from ...config_reader import ConfigReader, Served
from ...family import Dim, Draft, Family, TensorSpec
from ...lint import Lint
from ...reduced_vocabulary import IDS
from .engine_traits import ENGINE_TRAITS
from .geometry import MedusaGeometry

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...kinds.heads import HeadsForward

_HEADS = ("num_heads", "medusa_num_heads", "num_medusa_heads")
_LAYERS = ("num_hidden_layers", "medusa_num_layers", "num_medusa_layers")
"""Keys of vLLM, FasterDecoding and TensorRT-LLM; vLLM takes any with "num" and "heads" in it."""
_SERVED: Served = {"logit_scale": (1, "scaled logits")}
_ROOT = r"^(?:medusa_heads?\.)?"
_SPELLINGS = (
    (re.compile(_ROOT + r"(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\."), r"blocks.\1.layers.\2."),
    (re.compile(_ROOT + r"(\d+)\.(?:lm_head|\d+)\.weight$"), r"lm_heads.\1.weight"),
)


class Medusa(Family):
    """Medusa heads with all their name variants."""

    name = "medusa"
    engine_traits = ENGINE_TRAITS
    architectures = ("MedusaModel",)
    prefixes = (
        ("medusa_heads.blocks.", "blocks."),
        ("medusa_heads.lm_heads.", "lm_heads."),
        ("lm_head.", "lm_heads.0."),  # which stands behind every head
    )
    served_unquantized = ()
    makes_features = ()
    reduced_vocabulary = IDS
    layer_keys = "num_heads or num_hidden_layers"
    shared_tables = ()  # the heads are its own, and nothing is embedded
    linears_per_layer = 1
    cast_to_target = True

    @override
    def canonical_name(self, name: str) -> str:
        # As vLLM names them.
        for spelling, canonical in _SPELLINGS:
            name = spelling.sub(canonical, name)
        return super().canonical_name(name)

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """The first block of the first head."""
        return "blocks.0.layers.0.weight" in canonical_names

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> MedusaGeometry:
        keys = ConfigReader(config, where)
        keys.refuse_others(_SERVED)
        vocab = keys.positive("vocab_size")
        truncated = keys.positive("truncated_vocab_size", vocab)
        shared = keys.flag("original_lm_head", False)
        if truncated > vocab or (truncated < vocab and not shared):
            raise CheckpointError(
                where,
                f"truncated_vocab_size: {truncated} of {vocab} tokens"
                + ("" if truncated > vocab else " without original_lm_head: every head of vLLM's"
                   " has the whole vocabulary, and refuses fewer rows"),
                fix="correct the two sizes, or train heads that share one lm_head",
            )  # fmt: skip
        return MedusaGeometry(
            hidden_size=keys.positive("hidden_size"),
            vocab_size=vocab,
            truncated_vocab_size=truncated,
            num_heads=_spelled(keys, _HEADS),
            layers_per_head=_spelled(keys, _LAYERS),
            shared_head=shared,
            biased=keys.flag("medusa_fc_bias", False),
        )

    @override
    def tensor_specs(self, geometry: MedusaGeometry) -> Mapping[str, TensorSpec]:
        # Blocks may have biases whether config.json says so or not.
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        proposed = Dim(
            g.draft_vocab_size, "truncated_vocab_size" if g.shared_head else "vocab_size"
        )
        head = TensorSpec(role="head", shape=(proposed, hidden))
        table: dict[str, TensorSpec] = {}
        for i in range(g.num_heads):
            for j in range(g.layers_per_head):
                block = f"blocks.{i}.layers.{j}"
                table[f"{block}.weight"] = TensorSpec(role="mlp", shape=(hidden, hidden))
                table[f"{block}.bias"] = TensorSpec(
                    role="norm", shape=(hidden,), optional=not g.biased
                )
            if i == 0 or not g.shared_head:
                table[f"lm_heads.{i}.weight"] = head
        if g.truncated_vocab_size < g.vocab_size:
            table["token_map"] = TensorSpec(
                role="vocabulary_map", shape=(proposed,), dtypes=("I64", "I32")
            )
        return table

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "HeadsForward":
        from .forward import MedusaForward

        return MedusaForward(geometry, weights, on_input)


def _spelled(keys: ConfigReader, names: tuple[str, ...]) -> int:
    """The number under one of its names, which may stand there under several if they agree."""
    given = [name for name in names if keys.config.get(name) is not None] or [names[0]]
    found = {name: keys.positive(name) for name in given}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            keys.where,
            f"{' and '.join(f'{name} {number}' for name, number in found.items())} contradict"
            " each other: vLLM takes the one that stands last",
            fix=f"keep {names[0]!r}, with the number of the tensors",
        )
    return found[given[0]]


FAMILY = Medusa()
