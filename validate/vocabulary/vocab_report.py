"""What `vocab` returns: rows that were chosen and written, or the curve of all sizes."""

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from ...calibration.vocabulary.choosing import Choosing, ChosenRows
from ...quantize.vocabulary.cut_vocabulary import VocabularyReport
from ...recipes.brief import Brief
from .size_curve import SizeCurve
from .size_estimate import SizeEstimate


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VocabReport(Brief):
    """Rows of a head, chosen by what a target says.

    Attributes:
        choosing: the draft, the traces and the text that chooses the rows.
        rows: the rows that were kept, and what they cover; None for the curve.
        cut: the folder that was written; None for the curve.
        curve: the acceptance length by the number of rows; None where a folder was written.
        estimate: bytes and speed by the number of rows; None where a folder was written, and for a
            draft that cannot be estimated.
        warnings: what the command line prints as warnings.
    """

    choosing: Choosing
    rows: ChosenRows | None = None
    cut: VocabularyReport | None = None
    curve: SizeCurve | None = None
    estimate: SizeEstimate | None = None
    warnings: tuple[str, ...] = ()

    @override
    def brief(self) -> Mapping[str, object]:
        found: dict[str, object] = {}
        if self.curve is not None:
            found |= self.curve.brief()
        if self.cut is not None and self.rows is not None:
            found |= {**self.cut.brief(), "held-out coverage": f"{self.rows.held_out:.2%}"}
        return found | {"warnings": len(self.warnings) or None}
