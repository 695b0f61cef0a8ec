"""What the maths and the shapes of ordinary Llama layers follow from.

EAGLE-1 heads and small language models have such layers: grouped-query attention behind a norm and
an MLP behind another, in Llama's, Qwen2's (biased queries, keys and values) and Qwen3's (normed
heads) way.
"""

from dataclasses import dataclass

from ...geometry import LastStateGeometry
from ...rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaGeometry(LastStateGeometry):
    """Config of a draft of ordinary layers, which has the target's whole vocabulary.

    Attributes:
        input_bias: queries, keys and values have biases. output_bias: so has what they mix into.
        qk_norm: each head's query and key is normed before it is rotated.
        fc_bias: of EAGLE-1's fc; None = as the tensors are.
        reads_features: False for a draft that reads tokens alone.
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
    fc_bias: bool | None = None
    reads_features: bool = True
