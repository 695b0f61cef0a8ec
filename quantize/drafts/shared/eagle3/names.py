"""EAGLE-3: what all its families share; they differ in the attention of their layers.

Sources: SpecForge and TorchSpec exports; `llama_eagle3.py` and `deepseek_eagle3.py` of vLLM 0.33,
`llama_eagle3.py` and `kimi_k25_eagle3.py` of SGLang 0.5.23.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader, read_aux_layer_ids, reads_aux_layers
from ...family import Concat, Dim, Draft, Family, Lint, TensorSpec
from ...rope import read_rope
from ..attention.names import Shapes
from .geometry import Eagle3Geometry

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import ChainForward
    from ..attention.forward import Attention

_LATER_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.")


class Eagle3(Family):
    """Tensor table and forward maths over the attention that a family adds."""

    prefixes = (
        ("draft_model.", ""),
        ("eagle_module.", ""),
        ("model.", ""),
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    )
    one_layer = True
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ("fc.", "fc_norm.", "input_norm.")
    whole_vocabulary = None
    misnamed: Mapping[str, Lint] = {
        "deepseek_v3": Lint(  # `hf_config_override` of vLLM 0.33; it leaves kimi_k2 alone
            name="model-type",
            level="warning",
            cause="model_type deepseek_v3: vLLM 0.33 rewrites it to deepseek_mtp and the"
            " architecture to DeepSeekMTPModel, and does not load the draft",
            remedy="write kimi_k2, the same configuration class under another name",
            fix={"model_type": "kimi_k2"},
        )
    }
    relatives: Mapping[str, str] = {
        "mask_hidden": "P-EAGLE",
        "enorm.": "EAGLE-3 with TensorRT-LLM's eh_proj",
        "parallel_draft_heads.": "EAGLE-3 with ModelOpt's parallel heads",
    }

    @override
    def canonical_name(self, name: str) -> str:
        # SGLang calls the input norm of later layers hidden_norm.
        return _LATER_HIDDEN_NORM.sub(r"layers.\1.input_layernorm.", super().canonical_name(name))

    @abstractmethod
    def attention_shapes(self, geometry: Any, width: Dim) -> Shapes:
        """The attention weights of a layer that reads rows of `width`."""

    @abstractmethod
    def attention(self, geometry: Any) -> "Attention":
        """The projections of the forward maths; imports torch."""

    @override
    def tensor_specs(self, geometry: Eagle3Geometry) -> Mapping[str, TensorSpec]:
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        vocab = Dim(g.vocab_size, "vocab_size")
        draft_vocab = Dim(g.draft_vocab_size, "draft_vocab_size")
        features = Dim(
            g.num_aux_layers * g.target_hidden_size, "target_hidden_size x aux layer ids"
        )
        table = {
            "embed_tokens.weight": TensorSpec(
                role="embedding", shape=(vocab, hidden), optional=True
            ),
            "lm_head.weight": TensorSpec(role="head", shape=(draft_vocab, hidden), optional=True),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "d2t": TensorSpec(
                role="vocabulary_map",
                shape=(draft_vocab,),
                dtypes=("I64", "I32"),
                optional=g.draft_vocab_size == g.vocab_size,
            ),
            "t2d": TensorSpec(
                role="vocabulary_map", shape=(vocab,), dtypes=("BOOL",), optional=True
            ),
        }
        if g.fuses:
            table["fc.weight"] = TensorSpec(role="fusion", shape=(hidden, features))
        if g.norm_before_fc:
            table["input_norm.weight"] = TensorSpec(role="norm", shape=(features,))
        if g.fc_norm:
            chunk = Dim(g.target_hidden_size, "target_hidden_size")
            for i in range(g.num_aux_layers):
                table[f"fc_norm.{i}.weight"] = TensorSpec(role="norm", shape=(chunk,))
        for i in range(g.num_layers):
            table |= {
                f"layers.{i}.{name}.weight": TensorSpec(role=role, shape=shape)
                for name, (role, shape) in self._layer_shapes(g, i).items()
            }
        return table

    @override
    def concat(self, geometry: Any) -> Concat:
        # Layer 0 reads [norm(embedding); norm(hidden)].
        wide = Dim(2 * geometry.hidden_size, "2 x hidden_size")
        shapes = self.attention_shapes(geometry, wide)
        linears = [name for name, (_, shape) in shapes.items() if shape[-1] is wide]
        return Concat(
            norm="layers.0.input_layernorm.weight",
            linears=tuple(f"layers.0.{name}.weight" for name in linears),
        )

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "ChainForward":
        from .forward import Eagle3Forward

        return Eagle3Forward(geometry, weights, on_input, self.attention(geometry))

    def _layer_shapes(self, g: Eagle3Geometry, i: int) -> Shapes:
        """Layer 0 reads [embedding; hidden], twice as wide as the ordinary layers after it."""
        hidden = Dim(g.hidden_size, "hidden_size")
        inner = Dim(g.intermediate_size, "intermediate_size")
        wide = Dim(2 * g.hidden_size, "2 x hidden_size") if i == 0 else hidden
        shapes: Shapes = self.attention_shapes(g, wide) | {
            "mlp.gate_proj": ("mlp", (inner, hidden)),
            "mlp.up_proj": ("mlp", (inner, hidden)),
            "mlp.down_proj": ("mlp", (hidden, inner)),
            "input_layernorm": ("norm", (hidden,)),
            "post_attention_layernorm": ("norm", (hidden,)),
        }
        if i == 0:
            shapes["hidden_norm"] = ("norm", (hidden,))
        return shapes


def read_common(config: Mapping[str, Any], where: object, family: str) -> dict[str, Any]:
    """The fields of `Eagle3Geometry`, from config.json.

    Raises:
        CheckpointError: a key is missing or wrong, or asks for what no engine serves.
    """
    keys = ConfigReader(config, where)
    nested = keys.section("eagle_config")
    hidden, vocab = keys.positive("hidden_size"), keys.positive("vocab_size")
    target_hidden = keys.positive("target_hidden_size", hidden)
    fuses = reads_aux_layers(config, where)
    ids = read_aux_layer_ids(config, where).after if fuses else None
    if not fuses and target_hidden != hidden:
        raise CheckpointError(
            where,
            f"use_aux_hidden_state: false needs a target as wide as the draft: {target_hidden} is"
            f" not {hidden}",
            fix="correct 'use_aux_hidden_state' of eagle_config, or 'target_hidden_size'",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            where,
            f"hidden_act: expected 'silu', as {family} is served, got {activation!r}",
            fix="use another draft: this one cannot be replayed or served as it was trained",
        )
    for biased in ("attention_bias", "mlp_bias"):
        if keys.flag(biased, False):
            raise CheckpointError(
                where,
                f"{biased}: expected false, got true: {family} linears have no bias",
                fix="this draft cannot be quantized: its biases would be lost; as it is, check says"
                " which engine serves it",
            )
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.positive("intermediate_size"),
        "num_layers": keys.positive("num_hidden_layers"),
        "num_attention_heads": keys.positive("num_attention_heads"),
        "vocab_size": vocab,
        "draft_vocab_size": keys.positive("draft_vocab_size", vocab),
        "target_hidden_size": target_hidden,
        "num_aux_layers": len(ids) if ids else 3 if fuses else 1,
        "fuses": fuses,
        "aux_layer_ids": ids,
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(config, where),
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "norm_before_fc": fuses
        and (keys.flag("norm_before_fc", False) or nested.flag("norm_before_fc", False)),
        "fc_norm": fuses and keys.flag("fc_norm", False),
        "norm_output": keys.flag("norm_output", False),
    }
