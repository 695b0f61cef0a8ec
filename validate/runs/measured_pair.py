"""What the gate is given beside traces, or instead of them: measurements of servers, and parity.

What was measured has to be of the drafts that are named. A measurement says which draft its server
ran by the hash of its tensors (`measure --draft`), and a report of parity which drafts it looked
at. Where nothing says it, two measurements alone do not release a draft that is named: they could
be of any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import GateError
from ...recipes.regular_file import AnyPath
from ..foreign.foreign_formats import is_foreign, read_foreign_pair
from ..foreign.foreign_measurement import ForeignPair
from ..judging.candidate_origin import DraftFolder
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..parity.finding import Finding, ParityReport, read_parity
from ..served.served_gate import draft_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is judged beside traces, or instead of them.

    Attributes:
        runs: of the BF16 and of the quantized draft. again: the BF16 draft's, measured once more.
        parity: reports of 'draftquant parity'.
    """

    runs: tuple[Measurement, Measurement] | ForeignPair | None
    again: Measurement | None
    parity: tuple[ParityReport, ...]

    @classmethod
    def read(
        cls,
        measured: Sequence[AnyPath] | None,
        baseline_again: AnyPath | None,
        parity: Sequence[AnyPath],
    ) -> "Measured":
        """Read the files that the options of the same names give.

        Raises:
            GateError: a second measurement of the baseline is given beside files of another tool.
            MeasureError: a measurement cannot be read. ParityError: a report of parity cannot.
        """
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
                    "shows the server's noise between measurements of 'draftquant measure'; these"
                    " are of another tool",
                    fix="leave it out, or measure all three with 'draftquant measure'",
                )
            again = read_measurement(Path(baseline_again))
        return cls(runs=runs, again=again, parity=tuple(read_parity(Path(p)) for p in parity))

    @property
    def nothing(self) -> bool:
        """Traces alone are judged."""
        return self.runs is None and not self.parity

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all reports of parity."""
        return tuple(one for report in self.parity for one in report.findings)

    @property
    def own(self) -> tuple[Measurement, ...]:
        """Baseline and candidate, measured by this package; none of another tool."""
        return self.runs if isinstance(self.runs, tuple) else ()

    @property
    def num_draft_tokens(self) -> int | None:
        """K that was served; None where nothing was, or no draft."""
        if self.runs is None:
            return None
        if isinstance(self.runs, tuple):
            speculation = self.runs[0].setup.speculation
            return None if speculation is None else speculation.num_draft_tokens
        return self.runs.baseline.num_draft_tokens

    def not_tied(self) -> Iterator[str]:
        """Measurements that may be of any draft."""
        if self.runs is None:
            return
        if isinstance(self.runs, tuple):
            names = [one.name for one in self.runs if draft_sha256(one) is None]
        else:
            names = [self.runs.baseline.name, self.runs.candidate.name]
        for name in names:
            yield f"whether the server of {name} ran the draft that is named ({name} does not say)"

    def check_parity(self, folders: Sequence[DraftFolder]) -> tuple[str, ...]:
        """Each report of parity is of the drafts that are judged.

        Args:
            folders: that are named: baseline and candidate.

        Returns:
            What nothing verifies, in sentences without a full stop.

        Raises:
            GateError: a report is of another draft.
        """
        known = {*map(draft_sha256, self.own), *(folder.sha256 for folder in folders)}
        warnings = []
        for report in self.parity:
            named = [digest for digest in report.drafts_sha256 if digest is not None]
            strange = [
                digest
                for digest in named
                if digest not in known and not any(one.is_identity(digest) for one in folders)
            ]
            # Where a measurement does not say whose it is, and no draft is named, it may be its.
            if strange and (folders or (self.own and None not in known)):
                raise GateError(
                    report.path,
                    f"is of another draft than those that are judged (tensors {strange[0][:12]})",
                    fix="give what 'draftquant parity --report' wrote of these drafts",
                )
            if strange or not named or len(named) < len(report.drafts_sha256):
                warnings.append(
                    f"nothing shows that the findings of {report.path.name} are about the drafts"
                    " that are judged: it, or a measurement, does not record whose it is"
                )
        return tuple(warnings)
