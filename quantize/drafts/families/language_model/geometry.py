"""What the maths and the shapes of a small language model follow from.

Its layers have grouped-query attention behind a norm and an MLP behind another, in Llama's, Qwen2's
(biased queries, keys and values) and Qwen3's (normed heads) way.
"""

from dataclasses import dataclass

from typing_extensions import override

from ...geometry import LastStateGeometry
from ...rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelGeometry(LastStateGeometry):
    """Config of a language model, which has the target's whole vocabulary.

    Attributes:
        input_bias: queries, keys and values have biases. output_bias: so has what they mix into.
        qk_norm: each head's query and key is normed before it is rotated.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    input_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool

    @property
    @override
    def reads_features(self) -> bool:
        return False
