"""What of a draft stands outside its layers, as engines build it."""

from .contract import Question


def has_fc(question: Question) -> bool:
    """Whether it has an fc, over outputs of the target's layers or over its last state."""
    return question.fuses or question.family == "eagle1-llama"


def has_head(question: Question) -> bool:
    """Whether engines build a head of the draft's own: EAGLE-1's is the target's always."""
    tied = question.config.get("tie_word_embeddings") is True
    if question.family == "language-model":
        return not tied
    return question.family != "eagle1-llama"


def is_parallel(question: Question) -> bool:
    """Whether all tokens of a round are drafted in one pass, as P-EAGLE does."""
    return any(name.endswith("mask_hidden") for name in question.tensor_names)
