"""A recurrent drafter, as a new family would be written: this one module is all of it.

An MLP over the token read and what is left of the state before it; its passes are of no kind that
is there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from ..config_reader import ConfigReader
from ..family import Dim, Draft, Family, Lint, TensorSpec
from ..forward import DraftForward, Drafting, DraftPass
from ..geometry import Geometry
from ..maths import Tensor, embedding, linear, rms_norm, torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyGeometry(Geometry):
    """Config of a recurrent drafter, which has no attention."""

    num_attention_heads: int = 0
    rope: None = None


class ToyForward(DraftForward):
    """s_0 = fc(features), s_{j+1} = e + mlp(e + decay * s_j) of the embedding e of the token read.

    No row looks at another one, so that chains may be run in any order.
    """

    geometry: ToyGeometry

    @override
    def fuse(self, features: Tensor) -> Tensor:
        return self._linear("fc", features)

    @override
    def drafted(self, asked: Drafting) -> Iterator[DraftPass]:
        for start in range(0, len(asked.rows), asked.block_rows):
            chosen = asked.rows[start : start + asked.block_rows]
            state = asked.hidden[:, chosen.start : chosen.stop : chosen.step]
            for depth in range(asked.num_draft_tokens):
                first, last = chosen.start + 1 + depth, chosen.stop + 1 + depth
                state = self._step(asked.token_ids[:, first : last : chosen.step], state)
                where = f"recurrent step {depth + 1}"
                yield DraftPass(
                    rows=chosen,
                    depths=range(depth, depth + 1),
                    where=where,
                    hidden=asked.checked(state, where)[:, :, None],
                )

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return linear(self.head_input(hidden), self.weights["lm_head.weight"])

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, self.weights["norm.weight"], self.geometry.rms_norm_eps)
        return self.on_input("lm_head", normed)

    def _step(self, token_ids: Tensor, state: Tensor) -> Tensor:
        e = embedding(token_ids, self.weights["embed_tokens.weight"], state.dtype)
        x = e + self.weights["decay"] * state
        for i in range(self.geometry.num_layers):
            mlp = f"layers.{i}.mlp"
            gate, up = self._linear(f"{mlp}.gate_proj", x), self._linear(f"{mlp}.up_proj", x)
            x = e + self._linear(f"{mlp}.down_proj", torch.nn.functional.silu(gate) * up)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(self.on_input(name, x), self.weights[f"{name}.weight"]).to(x.dtype)


def depth(draft: Draft) -> Iterator[Lint]:
    if draft.geometry.num_layers > 1:
        yield Lint(name="toy-layers", level="note", cause="it is deep", remedy="leave it")


class Toy(Family):
    """The toy family."""

    name = "toy"
    architectures = ("ToyForCausalLM",)
    prefixes = (("model.", ""),)
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ("fc.",)
    linears_per_layer = 3
    marks = frozenset({"fc.weight", "decay"})
    maths = ToyForward
    lints = (depth,)

    @override
    def geometry(self, keys: ConfigReader) -> ToyGeometry:
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


FAMILY = Toy()
