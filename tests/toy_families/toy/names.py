"""A recurrent drafter: an MLP over the token read and what is left of the state before it."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...config_reader import ConfigReader
from ...family import Dim, Draft, Family, TensorSpec
from ...lint import Lint
from .geometry import ToyGeometry

if TYPE_CHECKING:
    import torch

    from ...forward import DraftForward, OnInput


class Toy(Family):
    """The toy family."""

    name = "toy"
    architectures = ("ToyForCausalLM",)
    prefixes = (("model.", ""),)
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ("fc.",)
    linears_per_layer = 3

    @override
    def recognises(self, canonical_names: Collection[str]) -> bool:
        return {"fc.weight", "decay"} <= set(canonical_names)

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> ToyGeometry:
        keys = ConfigReader(config, where)
        ids = keys.layer_ids("aux_layer_ids") or ()
        hidden, vocab = keys.positive("hidden_size"), keys.positive("vocab_size")
        return ToyGeometry(
            hidden_size=hidden,
            intermediate_size=keys.positive("intermediate_size"),
            num_layers=keys.positive("num_hidden_layers"),
            vocab_size=vocab,
            draft_vocab_size=vocab,
            target_hidden_size=keys.positive("target_hidden_size", hidden),
            num_aux_layers=len(ids),
            aux_layer_ids=ids,
            rms_norm_eps=keys.number("rms_norm_eps"),
        )

    @override
    def tensor_specs(self, geometry: ToyGeometry) -> Mapping[str, TensorSpec]:
        hidden = Dim(geometry.hidden_size, "hidden_size")
        inner = Dim(geometry.intermediate_size, "intermediate_size")
        vocab = Dim(geometry.vocab_size, "vocab_size")
        features = Dim(geometry.num_aux_layers * geometry.target_hidden_size, "aux_layer_ids")
        table = {
            "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden)),
            "lm_head.weight": TensorSpec(role="head", shape=(vocab, hidden)),
            "fc.weight": TensorSpec(role="fusion", shape=(hidden, features)),
            "decay": TensorSpec(role="norm", shape=(hidden,)),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
        }
        for i in range(geometry.num_layers):
            mlp = f"layers.{i}.mlp"
            table[f"{mlp}.gate_proj.weight"] = TensorSpec(role="mlp", shape=(inner, hidden))
            table[f"{mlp}.up_proj.weight"] = TensorSpec(role="mlp", shape=(inner, hidden))
            table[f"{mlp}.down_proj.weight"] = TensorSpec(role="mlp", shape=(hidden, inner))
        return table

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        if draft.geometry.num_layers > 1:
            yield Lint(name="toy-layers", level="note", cause="it is deep", remedy="leave it")

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "DraftForward":
        from .forward import ToyForward

        return ToyForward(geometry, weights, on_input)


FAMILY = Toy()
