"""DFlash2: `DFlash2DraftModel`, DFlash with convolutions in its layers and a candidate selector.

Sources: `qwen3_dflash2.py` of vLLM 0.33, `dflash.py` of SGLang 0.5.23. Engines read the keys of its
own in `dflash_config` only; `input_embedding_scale` only vLLM, which is followed.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader, Served
from ...family import Dim, Draft, Lint, TensorSpec
from ..dflash.names import DFlash
from .engine_traits import ENGINE_TRAITS
from .geometry import DFlash2Geometry
from .speculators_form import FORMS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import BlockForward

_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_SELECTOR = "candidate_selector."


class DFlash2(DFlash):
    """The DFlash2 family."""

    name = "dflash2"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    architectures = ("DFlash2DraftModel",)
    whole_vocabulary = "the candidates of its selector are tokens of the target"
    served: Served = {  # noqa: RUF012 - a constant of the class
        key: value
        for key, value in DFlash.served.items()
        if key not in ("conv_kernel_size", "selector_rank")
    }

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> DFlash2Geometry:
        common = self.common_keys(config, where)
        own = ConfigReader(config, where).section("dflash_config")
        group_size = own.positive("conv_group_size")
        if common["hidden_size"] % group_size:
            raise _wrong(
                own,
                f"conv_group_size: expected a divisor of hidden_size {common['hidden_size']}, got"
                f" {group_size}",
                fix="correct 'conv_group_size'",
            )
        vocab = common["vocab_size"]
        if common["draft_vocab_size"] != vocab:
            raise _wrong(
                own,
                f"draft_vocab_size: expected vocab_size {vocab}, got {common['draft_vocab_size']}:"
                " the selector's candidates are tokens of the target",
                fix="no engine serves a DFlash2 draft of another vocabulary",
            )
        top_k = own.positive("selector_top_k")
        if top_k > vocab:
            raise _wrong(
                own,
                f"selector_top_k: expected at most vocab_size {vocab}, got {top_k}",
                fix="correct 'selector_top_k'",
            )
        # Engines take 0 for none, like a key that is missing.
        capped = own.config.get("final_logit_softcapping") not in (None, 0)
        return DFlash2Geometry(
            **common,
            conv_kernel_size=own.positive("conv_kernel_size"),
            conv_group_size=group_size,
            selector_rank=own.positive("selector_rank"),
            selector_top_k=top_k,
            input_embedding_scale=own.number("input_embedding_scale", 1.0),
            output_multiplier=own.number("output_multiplier", 1.0),
            final_logit_softcapping=own.number("final_logit_softcapping") if capped else None,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DFlash2Geometry = geometry
        hidden, taps = Dim(g.hidden_size, "hidden_size"), g.conv_kernel_size
        rank, vocab = Dim(g.selector_rank, "selector_rank"), Dim(g.vocab_size, "vocab_size")
        base = (Dim(2, "input and output"), Dim(taps, "conv_kernel_size"), hidden)
        added = Dim(2 * taps * g.num_groups, "conv_kernel_size, hidden_size and conv_group_size")
        conv = {
            "base_kernel": TensorSpec(role="proposal", shape=base),
            "kernel_projection.weight": TensorSpec(role="proposal", shape=(added, hidden)),
        }
        selector = {
            "predecessor_codebook": TensorSpec(role="proposal", shape=(vocab, rank)),
            "successor_codebook": TensorSpec(role="proposal", shape=(vocab, rank)),
            "hidden_projection.weight": TensorSpec(role="proposal", shape=(rank, hidden)),
        }
        return {
            **super().tensor_specs(g),
            **{
                f"layers.{i}.{where}.{name}": spec
                for i in range(g.num_layers)
                for where in _CONVOLUTIONS
                for name, spec in conv.items()
            },
            **{f"{_SELECTOR}{name}": spec for name, spec in selector.items()},
        }

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "BlockForward":
        from .forward import DFlash2Forward

        return DFlash2Forward(geometry, weights, on_input)


def _wrong(keys: ConfigReader, what: str, fix: str) -> CheckpointError:
    return CheckpointError(keys.where, what, fix=fix)


FAMILY = DFlash2()
