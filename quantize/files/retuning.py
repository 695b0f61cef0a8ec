"""The mark of a draft that was taught by its target: in draftquant.json, and in README.md.

What such a draft accepts more than the one that it was made of is training, not quantization. So it
is compared with the unquantized draft taught alike, and each of the two says what it is.
"""

from dataclasses import dataclass
from pathlib import Path

from .card_text import read_card, split_front


@dataclass(frozen=True, slots=True, kw_only=True)
class Retuning:
    """How a draft was taught, beside what `LearnedRounding` says; both drafts have the same.

    Attributes:
        learning_rate: of weights, in units of codes.
        temperature: by which logits are divided in the cross-entropy of the recorded tokens.
        anchor: weight of the divergence from the unquantized draft beside it.
        learned_prompts: how many were learned from.
        linears: on-disk names of the modules that learned; everything else is the source's.
        settings_sha256: of all settings, those that stand nowhere else in a record too.
        baseline_sha256: `tensors_sha256` of the unquantized draft taught alike; None in its own
            record.
    """

    learning_rate: float
    temperature: float
    anchor: float
    learned_prompts: int
    linears: tuple[str, ...]
    settings_sha256: str
    baseline_sha256: str | None = None


def marked_card(source: Path, retuning: Retuning) -> str:
    """README.md of a source, if it has one, saying before all but its front matter what this is.

    Raises:
        CheckpointError: it cannot be read.
    """
    front, text = split_front(read_card(source))
    what = "quantized"
    beside = (
        f"Compare it with the unquantized draft taught alike (tensors {retuning.baseline_sha256})"
    )
    if retuning.baseline_sha256 is None:
        what = "unquantized"
        beside = "It is what the quantized one is compared with, and not the draft as released"
    mark = (
        "# RETUNED\n\n"
        f"This {what} draft was taught by its target: {len(retuning.linears)} linears learned the"
        f" recorded tokens of {retuning.learned_prompts} prompts (cross-entropy at temperature"
        f" {retuning.temperature:g}, plus {retuning.anchor:g} times the divergence from the draft"
        " as released). What it accepts more than that draft is training, not quantization."
        f" {beside}.\n"
    )
    return front + mark + (f"\n{text}" if text else "")
