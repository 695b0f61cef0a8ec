"""EAGLE-3: what all its families share; they differ in the attention of their layers.

Sources: SpecForge and TorchSpec exports, SpecForge `llama3_eagle.py`; `llama_eagle3.py` and
`deepseek_eagle3.py` of vLLM 0.33, `llama_eagle3.py` and `kimi_k25_eagle3.py` of SGLang 0.5.23.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..config_reader import ConfigReader, read_aux_layer_ids, reads_aux_layers
from ..family import Concat, Dim, Draft, Family, TensorSpec
from ..forward import Attend
from ..geometry import RotatedGeometry
from ..maths import Tensor, embedding, torch
from ..passes import ChainForward
from . import layers as decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Geometry(RotatedGeometry):
    """Config of an EAGLE-3 draft with any attention.

    Attributes:
        parallel: P-EAGLE: all tokens of a step are drafted in one pass, those after the first from
            mask tokens with a trained mask_hidden.
        windows: positions that a query of each layer sees, as vLLM serves it; None = all.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    parallel: bool = False
    windows: tuple[int | None, ...] = ()

    @override
    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


def eagle3(draft: Draft) -> Eagle3Geometry | None:
    """The geometry of an EAGLE-3 draft, None for drafts of other kinds."""
    return draft.geometry if isinstance(draft.geometry, Eagle3Geometry) else None


class Eagle3Forward(decoder.LayersForward, ChainForward):
    """One EAGLE-3 draft.

    The hidden state fed into the next step is the residual stream before the final norm (after it
    with `norm_output`, the EAGLE-3.1 option).
    """

    geometry: Eagle3Geometry

    @override
    def fuse(self, features: Tensor) -> Tensor:
        # g_t = fc(features), after input_norm or one fc_norm per target layer if asked. A draft
        # without fc reads the target's last hidden state unchanged.
        if not self.geometry.fuses:
            return features
        if self.geometry.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.geometry.fc_norm:
            chunks = features.chunk(self.geometry.num_aux_layers, dim=-1)
            normed = [self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)]
            features = torch.cat(normed, dim=-1)
        return self.linear("fc", features)

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # Layer 0 reads [norm(embedding); norm(hidden)].
        embedded = embedding(token_ids, self.weights["embed_tokens.weight"], hidden.dtype)
        e = self.norm("layers.0.input_layernorm", embedded)
        u = self.norm("layers.0.hidden_norm", hidden)
        x = u if self.geometry.norm_before_residual else hidden
        x = self.layer(0, x, positions, attend, normed=torch.cat((e, u), dim=-1))
        for layer in range(1, self.geometry.num_layers):
            x = self.layer(layer, x, positions, attend)
        return self.norm("norm", x) if self.geometry.norm_output else x

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.geometry.norm_output else self.norm("norm", hidden)
        return self.on_input("lm_head", normed)


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
    maths: type[Eagle3Forward] = Eagle3Forward
    misnamed: Mapping[str, tuple[str, str]] = {
        # `hf_config_override` of vLLM 0.33 leaves kimi_k2 alone.
        "deepseek_v3": ("model-type-deepseek", "kimi_k2")
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

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: Eagle3Geometry = geometry
        hidden, chunk = decoder.dims(g, "hidden_size", "target_hidden_size")
        features = Dim(g.num_aux_layers * chunk.size, "target_hidden_size x aux layer ids")
        norm = TensorSpec(role="norm", shape=(hidden,))
        table = decoder.vocabulary_specs(g, {"norm.weight": norm}, head_optional=True)
        if g.fuses:
            table["fc.weight"] = TensorSpec(role="fusion", shape=(hidden, features))
        if g.norm_before_fc:
            table["input_norm.weight"] = TensorSpec(role="norm", shape=(features,))
        for i in range(g.num_aux_layers if g.fc_norm else 0):
            table[f"fc_norm.{i}.weight"] = TensorSpec(role="norm", shape=(chunk,))
        for i in range(g.num_layers):
            table |= decoder.layer_specs(g, i, width=self._concat_width(g) if i == 0 else hidden)
        table["layers.0.hidden_norm.weight"] = norm
        return table

    @override
    def concat(self, geometry: Any) -> Concat:
        # Layer 0 reads [norm(embedding); norm(hidden)].
        wide = self._concat_width(geometry)
        shapes = decoder.attention_shapes(geometry, wide)
        linears = [name for name, (_, shape) in shapes.items() if shape[-1] is wide]
        return Concat(
            norm="layers.0.input_layernorm.weight",
            linears=tuple(f"layers.0.{name}" for name in linears),
        )

    def _concat_width(self, g: Eagle3Geometry) -> Dim:
        return Dim(2 * g.hidden_size, "2 x hidden_size")


def read_common(keys: ConfigReader, family: str) -> dict[str, Any]:
    """The fields of `Eagle3Geometry`, from config.json."""
    nested = keys.section("eagle_config")
    hidden, vocab = keys.positive("hidden_size"), keys.positive("vocab_size")
    target_hidden = keys.positive("target_hidden_size", hidden)
    fuses = reads_aux_layers(keys.config, keys.where)
    ids = read_aux_layer_ids(keys.config, keys.where).after if fuses else None
    fits = fuses or target_hidden == hidden
    if not fits:
        raise CheckpointError(
            keys.where,
            f"use_aux_hidden_state: false needs a target as wide as the draft: {target_hidden} is"
            f" not {hidden}",
            fix="correct 'use_aux_hidden_state' of eagle_config, or 'target_hidden_size'",
        )
    decoder.check_silu(keys, family)
    for biased in ("attention_bias", "mlp_bias"):
        if keys.flag(biased, False):
            raise CheckpointError(
                keys.where,
                f"{biased}: expected false, got true: {family} linears have no bias",
                fix="this draft cannot be quantized: its biases would be lost; as it is, check"
                " says which engine serves it",
            )
    return {
        **decoder.read_sizes(keys),
        "draft_vocab_size": keys.positive("draft_vocab_size", vocab),
        "target_hidden_size": target_hidden,
        "num_aux_layers": len(ids) if ids else 3 if fuses else 1,
        "fuses": fuses,
        "aux_layer_ids": ids,
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "norm_before_fc": fuses
        and (keys.flag("norm_before_fc", False) or nested.flag("norm_before_fc", False)),
        "fc_norm": fuses and keys.flag("fc_norm", False),
        "norm_output": keys.flag("norm_output", False),
    }
