"""What the maths and the shapes of a multi-token prediction layer follow from."""

from dataclasses import dataclass

from typing_extensions import override

from ...geometry import LastStateGeometry, TokenLimit
from ...rope import RopeConfig
from ..mixture.names import Mixture

_WHY = (
    "the draft has a module for each of so many tokens, and in the steps after them an engine"
    " writes over the keys that the first steps of the next round look at"
)


def around_layer(number: int, name: str) -> str:
    """The canonical name of what stands around a module's decoder layer."""
    return f"modules.{number}.{name}" if number else name


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpGeometry(LastStateGeometry):
    """Config of one MTP layer, which is a target's own; widths in elements.

    Attributes:
        intermediate_size: of its MLP, where it has no mixture of experts.
        mixture: of experts in place of the MLP; None = none.
        num_layers: modules, each with one decoder layer.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    mixture: Mixture | None = None
    num_layers: int = 1

    @property
    @override
    def num_modules(self) -> int:
        return self.num_layers

    @property
    @override
    def token_limit(self) -> TokenLimit | None:
        return TokenLimit(self.num_modules, _WHY) if self.num_modules > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpGroupedGeometry(MtpGeometry):
    """An MTP layer with grouped-query attention.

    Attributes:
        qkv_bias: q, k and v have biases, as in Qwen2.
        qk_norm: each head's query and key is normed before it is rotated, as in Qwen3.
        rotary_dim: the first so many elements of a head are rotated.
        output_gate: q_proj gives each head's query and, behind it, the gate of the head's output.
    """

    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    rotary_dim: int
    output_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpStepGeometry(MtpGroupedGeometry):
    """Modules of Step-3.5, which read what the target's last layer gave before the final norm.

    What a head saw is weighed by the sigmoid of one number, of g_proj.

    Attributes:
        target_layers: decoder layers of the target.
        window: rows that a query looks at, its own among them; None = all.
    """

    target_layers: int
    window: int | None

    @property
    @override
    def aux_layer_ids(self) -> tuple[int, ...]:
        return (self.target_layers - 1,)

    @property
    @override
    def reads_layers(self) -> bool:
        return True  # though there is no fc over it

    @override
    def window_of(self, layer: int) -> int | None:
        return self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLatentGeometry(MtpGeometry):
    """An MTP layer with latent attention; see `Eagle3MlaGeometry`."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
