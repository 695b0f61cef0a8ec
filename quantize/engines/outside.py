"""What of a draft stands outside its layers, as engines build it."""

import re

from .contract import Question

CACHE_SCALE = re.compile(r"\.self_attn\.(?P<attn>attn\.)?(?:[kv]_proj\.)?(?:[kv]|kv)_scale$")
"""Names of scales of the KV cache, as exporters spell them."""


def has_fc(question: Question) -> bool:
    """Whether it has an fc, over outputs of the target's layers or over its last state."""
    return question.fuses or question.family == "eagle1-llama"


def is_tied(question: Question) -> bool:
    """Whether config.json makes the embedding the head."""
    return question.config.get("tie_word_embeddings") is True


def has_head(question: Question) -> bool:
    """Whether engines build a head of the draft's own: EAGLE-1's is the target's always."""
    if question.family == "language-model":
        return not is_tied(question)
    return question.family != "eagle1-llama"


def is_latent(question: Question) -> bool:
    """Whether its attention is latent, as DeepSeek's."""
    return any(".kv_b_proj." in name for name in question.tensor_names)


def is_parallel(question: Question) -> bool:
    """Whether all tokens of a round are drafted in one pass, as P-EAGLE does."""
    return any(name.endswith("mask_hidden") for name in question.tensor_names)
