"""README.md of a draft whose vocabulary was cut: the source's, saying before all what this is."""

from ..files.card_text import CARD_FILE, is_ours, read_card, split_front
from ..files.lineage import quantization_of
from ..files.provenance import Provenance
from ..files.vocabulary_cut import VocabularyChoice
from ..folder_card import renewed_card
from .cut_plan import CutPlan


def cut_card(plan: CutPlan, record: Provenance | None, choice: VocabularyChoice) -> dict[str, str]:
    """README.md and its text.

    Args:
        choice: why these rows are kept.

    Raises:
        CheckpointError: the card of the source cannot be read.
    """
    source = plan.source
    card = read_card(source.checkpoint.folder)
    size, vocabulary = len(plan.kept.rows), source.draft.geometry.vocab_size
    said = f"vocabulary {size:,} of {vocabulary:,}"
    quantized = quantization_of(record)
    if is_ours(card) and quantized is not None:
        recipe = quantized.recipe
        return renewed_card(source, quantized, recipe, plan.bytes_after, vocabulary=said)
    front, text = split_front(card)
    mark = (
        f"# CUT VOCABULARY\n\nThe head of this draft has rows for {size:,} of the {vocabulary:,}"
        f" tokens of its target ({said}), and proposes no others. They were chosen by"
        f" {len(choice.calibration_prompts):,} recorded prompts; draftquant.json says how.\n"
    )
    return {CARD_FILE: front + mark + (f"\n{text}" if text else "")}
