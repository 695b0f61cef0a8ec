"""How a vocabulary was cut, as draftquant.json records it: which rows were kept, and why."""

from dataclasses import dataclass
from typing import Literal

from ...recipes.seen_prompts import SeenPrompts, Sketches
from .provenance_sources import SourceDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyChoice:
    """Why these rows were kept.

    Attributes:
        method: how the tokens were ordered, in words.
        traces_sha256: of the trace folder whose target tokens were counted.
        size: rows that were asked for; None where a coverage was.
        coverage: share of the target's tokens that was asked for; None where a size was.
        coverage_reached: share of the counted tokens that the rows stand for.
        calibration_prompts, calibration_sketches: of the prompts that were counted, by which the
            gate knows them whatever they are called: see `SeenPrompts`.
    """

    method: str
    traces_sha256: str
    size: int | None = None
    coverage: float | None = None
    coverage_reached: float
    calibration_prompts: tuple[str, ...]
    calibration_sketches: Sketches | None = None

    @property
    def prompts(self) -> SeenPrompts:
        """The prompts that chose the rows."""
        return SeenPrompts(sha256=self.calibration_prompts, sketches=self.calibration_sketches)

    def problem(self) -> str | None:
        """What two keys say of one thing differently, or None."""
        if (self.size is None) == (self.coverage is None):
            return "size and coverage: expected one of the two"
        if not 0 <= self.coverage_reached <= 1 or not 0 <= (self.coverage or 0) <= 1:
            return "coverage and coverage_reached: expected shares from 0 to 1"
        if problem := self.prompts.problem():
            return f"calibration_prompts: {problem}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHead:
    """The target's table whose rows a draft without a head of its own was given.

    Attributes:
        tensor: its name there. digest: of all its bytes.
    """

    tensor: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyCut:
    """One cut of a vocabulary.

    Attributes:
        source: the folder that was cut, quantized or not.
        choice: why these rows were kept.
        vocabulary: tokens of the target.
        size_before: tokens that the draft could propose before. size: those that it can now.
        convention: the map from draft ids to target ids holds target id - draft id.
        missing: ids that were asked for, but for which the source had no row.
        head_from: where the rows came from, if the source had no head of its own.
    """

    source: SourceDraft
    choice: VocabularyChoice
    vocabulary: int
    size_before: int
    size: int
    convention: Literal["offsets"] = "offsets"
    missing: int = 0
    head_from: TargetHead | None = None

    def problem(self) -> str | None:
        """Sizes that no cut has, or None."""
        if not 0 < self.size <= self.size_before <= self.vocabulary:
            return (
                f"expected 0 < size <= size_before <= vocabulary, got {self.size},"
                f" {self.size_before}, {self.vocabulary}"
            )
        return None

    def __str__(self) -> str:
        return f"vocabulary {self.size:,} of {self.vocabulary:,}"
