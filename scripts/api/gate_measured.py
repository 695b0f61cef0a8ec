"""What the gate is given beside traces, or instead of them: measurements of servers, and parity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...validate.errors import GateError
from .arguments import AnyPath

if TYPE_CHECKING:
    from ...validate.foreign.foreign_measurement import ForeignPair
    from ...validate.measure.measurement import Measurement
    from ...validate.parity.finding import Finding, ParityReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is judged beside traces, or instead of them.

    Attributes:
        runs: of the BF16 and of the quantized draft. again: the BF16 draft's, measured once more.
        parity: reports of 'draftquant parity'.
    """

    runs: "tuple[Measurement, Measurement] | ForeignPair | None"
    again: "Measurement | None"
    parity: "tuple[ParityReport, ...]"

    @property
    def nothing(self) -> bool:
        """Traces alone are judged."""
        return self.runs is None and not self.parity

    @property
    def findings(self) -> "tuple[Finding, ...]":
        """Of all reports of parity."""
        return tuple(one for report in self.parity for one in report.findings)

    @property
    def num_draft_tokens(self) -> int | None:
        """K that was served; None where nothing was, or no draft."""
        if self.runs is None:
            return None
        if isinstance(self.runs, tuple):
            speculation = self.runs[0].setup.speculation
            return None if speculation is None else speculation.num_draft_tokens
        return self.runs.baseline.num_draft_tokens


def read_measured(
    measured: Sequence[AnyPath] | None, baseline_again: AnyPath | None, parity: Sequence[AnyPath]
) -> Measured:
    """Read the files that the options of the same names give.

    Raises:
        GateError: a second measurement of the baseline is given beside files of another tool.
        MeasureError: a measurement cannot be read. ParityError: a report of parity cannot.
    """
    from ...validate.foreign.formats import is_foreign, read_foreign_pair
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.finding import read_parity

    runs: tuple[Measurement, Measurement] | ForeignPair | None = None
    again = None
    if measured:
        baseline, candidate = map(Path, measured)
        if is_foreign(baseline, candidate):
            runs = read_foreign_pair(baseline, candidate)
        else:
            runs = read_measurement(baseline), read_measurement(candidate)
    if baseline_again:
        if not isinstance(runs, tuple):
            raise GateError(
                "--baseline-again",
                "shows the server's noise between measurements of 'draftquant measure'; these are"
                " of another tool",
                fix="leave it out, or measure all three with 'draftquant measure'",
            )
        again = read_measurement(Path(baseline_again))
    reports = tuple(read_parity(Path(path)) for path in parity)
    return Measured(runs=runs, again=again, parity=reports)
