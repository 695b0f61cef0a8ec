"""Domino: DFlash whose logits are corrected from token to token, by a GRU and a projection.

Sources: SpecForge `modeling/draft/domino.py`, which trains it as `DominoDraftModel`; SGLang 0.5.23
`dflash.py:780-804`, which serves it as `DFlashDraftModel` with projector_type "domino". vLLM 0.33
has nothing like it.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ....errors import CheckpointError
from ...architectures import DOMINO
from ...config_reader import ConfigReader, Served
from ...family import Dim, Draft, TensorSpec
from ...lint import Lint
from ...speculators_form import SpeculatorsForm
from ..dflash.names import DFlash
from .engine_traits import ENGINE_TRAITS
from .geometry import DominoGeometry

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...kinds.block import BlockForward


class Domino(DFlash):
    """The Domino family."""

    name = "domino"
    engine_traits = ENGINE_TRAITS
    architectures = (DOMINO,)
    reduced_vocabulary = "its projection has a row for each token of the target"
    projectors: Mapping[str, str] = {"domino": DOMINO}
    speculators: Mapping[str, SpeculatorsForm] = {}
    misnamed: Mapping[str, Lint] = {
        **DFlash.misnamed,
        DOMINO: Lint(
            name="architecture-name",
            level="warning",
            cause=f"only its trainer knows the architecture {DOMINO}: SGLang 0.5.23 serves"
            " this draft as DFlashDraftModel with projector_type domino, and vLLM 0.33"
            " does not serve it",
            remedy="write DFlashDraftModel",
            fix={
                "architectures": ["DFlashDraftModel"],
                "dflash_config.projector_type": "domino",
            },
        ),
    }
    served: Served = {  # noqa: RUF012 - a constant of the class
        **{key: value for key, value in DFlash.served.items() if key != "shift_label"},
        "projector_type": ("domino", "another way to correct logits"),
    }

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> DominoGeometry:
        # As in SGLang, dflash_config goes before the top level.
        common = self.common_keys(config, where)
        options = self.options(config, where)
        if common["draft_vocab_size"] != common["vocab_size"]:
            raise CheckpointError(
                options.where,
                f"draft_vocab_size: expected vocab_size {common['vocab_size']}, got"
                f" {common['draft_vocab_size']}: the projection has a row for each token",
                fix="no engine serves a Domino draft of another vocabulary",
            )
        emb_dim, top = options.positive("emb_dim"), ConfigReader(config, where)
        if top.config.get("emb_dim") not in (None, emb_dim):
            raise CheckpointError(
                options.where,
                f"emb_dim: {emb_dim} in dflash_config, {top.positive('emb_dim')} beside it",
                fix="keep the one that the draft was trained with",
            )
        return DominoGeometry(
            **common,
            shift_label=options.flag("shift_label"),
            pure_draft_prefix_len=_count(options, "pure_draft_prefix_len"),
            gru_hidden_dim=options.positive("gru_hidden_dim"),
            emb_dim=emb_dim,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DominoGeometry = geometry
        hidden, vocab = Dim(g.hidden_size, "hidden_size"), Dim(g.vocab_size, "vocab_size")
        state, emb = Dim(g.gru_hidden_dim, "gru_hidden_dim"), Dim(g.emb_dim, "emb_dim")
        gates = Dim(3 * g.gru_hidden_dim, "gru_hidden_dim")
        both = Dim(g.hidden_size + g.gru_hidden_dim, "hidden_size and gru_hidden_dim")
        shapes = {
            "prefix_gru.weight_ih_l0": (gates, hidden),
            "prefix_gru.weight_hh_l0": (gates, state),
            "embed_proj.0.weight": (emb, both),
            "embed_proj.2.weight": (vocab, emb),
        }
        own = {name: TensorSpec(role="proposal", shape=shape) for name, shape in shapes.items()}
        return {**super().tensor_specs(g), **own}

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "BlockForward":
        from .forward import DominoForward

        return DominoForward(geometry, weights, on_input)


def _count(options: ConfigReader, key: str) -> int:
    """A whole number of at least 0; a missing key is the trainer's 0, which no engine takes."""
    return 0 if options.config.get(key) in (None, 0) else options.positive(key)


FAMILY = Domino()
