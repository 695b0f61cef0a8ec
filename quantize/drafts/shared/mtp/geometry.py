"""What the maths and the shapes of a multi-token prediction layer follow from."""

from dataclasses import dataclass

from ...rope import RopeConfig
from ..last_state import LastStateGeometry
from ..mixture.names import Mixture


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
    def num_modules(self) -> int:
        """Draft steps that have a module of their own; 1 = all steps are of one."""
        return self.num_layers


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
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target's last layer."""
        return (self.target_layers - 1,)

    @property
    def reads_layers(self) -> bool:
        """True: an output of a layer, though there is no fc over it."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLatentGeometry(MtpGeometry):
    """An MTP layer with latent attention; see `Eagle3MlaGeometry`."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
