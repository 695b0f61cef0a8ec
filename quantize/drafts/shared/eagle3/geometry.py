"""What the maths and the shapes of an EAGLE-3 draft follow from, with either attention."""

from dataclasses import dataclass

from typing_extensions import override

from ...geometry import ChainGeometry
from ...rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Geometry(ChainGeometry):
    """Config of an EAGLE-3 draft, whatever its attention; widths in elements.

    Attributes:
        num_aux_layers: how many target layers are concatenated into the input of fc.
        fuses: False for a draft that has no fc and reads the target's last hidden state, behind its
            final norm; num_aux_layers is then 1.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: EAGLE-3.1 and speculators
            options; all False in the published Kimi drafts.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux_layers: int
    aux_layer_ids: tuple[int, ...] | None
    rms_norm_eps: float
    rope: RopeConfig
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    fuses: bool = True

    @property
    @override
    def reads_layers(self) -> bool:
        return self.fuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3LlamaGeometry(Eagle3Geometry):
    """Config of an EAGLE-3 Llama draft; widths in elements.

    Attributes:
        qk_norm: each head's query and key is normed before it is rotated, as in Qwen3 layers.
        parallel: P-EAGLE: all tokens of a round are drafted in one pass, those after the first
            from mask tokens beside a trained mask_hidden.
        mask_token_id: of P-EAGLE; None where config.json does not say which.
        windows: positions that a query of each layer sees, as vLLM serves it; None = all. SGLang
            serves all of them.
    """

    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False
    parallel: bool = False
    mask_token_id: int | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def window(self) -> int | None:
        """Of the first layer that has one; None where none has."""
        return next((window for window in self.windows if window is not None), None)

    @override
    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3MlaGeometry(Eagle3Geometry):
    """Config of an EAGLE-3 MLA draft; widths in elements.

    Attributes:
        qk_nope_head_dim, qk_rope_head_dim: plain and rotated part of a head's query and key.
        rope_interleave: neighbouring dimensions turn together (vLLM 0.33 does so in any case,
            SGLang 0.5.23 as the config says).
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
