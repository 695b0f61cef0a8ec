"""What a gate judges besides traces: measurements of servers, and reports of parity.

Both must belong to the named drafts, by the hash of their tensors. Two measurements that name no
draft do not release one: they could belong to any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import GateError
from ..foreign.foreign_formats import read_foreign_pair
from ..foreign.foreign_measurement import ForeignPair
from ..judging.candidate_origin import DraftFolder
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..parity.finding import ParityReport, read_parity
from ..served.served_gate import draft_sha256
from .judging_asked import GateRun


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRuns:
    """What is judged besides traces, or instead of them; `again` is the baseline once more."""

    runs: tuple[Measurement, Measurement] | ForeignPair | None
    again: Measurement | None
    parity: tuple[ParityReport, ...]

    @classmethod
    def read(cls, asked: GateRun) -> "MeasuredRuns":
        """The requested files; GateError if noise is to be judged on another tool's files."""
        runs: tuple[Measurement, Measurement] | ForeignPair | None = None
        again = None
        if asked.measured:
            baseline, candidate = map(Path, asked.measured)
            runs = read_foreign_pair(baseline, candidate)
            runs = runs or (read_measurement(baseline), read_measurement(candidate))
        if asked.baseline_again:
            if not isinstance(runs, tuple):
                raise GateError(
                    "--baseline-again",
                    "shows the server's noise between measurements of 'draftquant measure'; these"
                    " are of another tool",
                    fix="leave it out, or measure all three with 'draftquant measure'",
                )
            again = read_measurement(Path(asked.baseline_again))
        parity = tuple(read_parity(Path(path)) for path in asked.parity)
        return cls(runs=runs, again=again, parity=parity)

    @property
    def nothing(self) -> bool:
        """True if only traces are judged."""
        return self.runs is None and not self.parity

    @property
    def own(self) -> tuple[Measurement, ...]:
        """Baseline and candidate, measured by this package; none of another tool."""
        return self.runs if isinstance(self.runs, tuple) else ()

    @property
    def num_draft_tokens(self) -> int | None:
        """K in serving; None where nothing, or no draft, was served."""
        if self.runs is None:
            return None
        if isinstance(self.runs, tuple):
            speculation = self.runs[0].setup.speculation
            return None if speculation is None else speculation.num_draft_tokens
        return self.runs.baseline.num_draft_tokens

    def not_tied(self) -> Iterator[str]:
        """Measurements that may belong to any draft."""
        if self.runs is None:
            return
        if isinstance(self.runs, tuple):
            names = [run.name for run in self.runs if draft_sha256(run) is None]
        else:
            names = [self.runs.baseline.name, self.runs.candidate.name]
        for name in names:
            yield f"whether the server of {name} ran the draft that is named ({name} does not say)"

    def check_parity(self, folders: Sequence[DraftFolder]) -> tuple[str, ...]:
        """What nothing verifies, in sentences; GateError if a report is about another draft."""
        known = {*map(draft_sha256, self.own), *(folder.sha256 for folder in folders)}
        warnings = []
        for report in self.parity:
            named = [digest for digest in report.drafts_sha256 if digest is not None]
            strange = [digest for digest in named if digest not in known]
            # If a measurement does not say whose it is, and no draft is named, it may be its.
            if strange and (folders or (self.own and None not in known)):
                what = f"is of another draft than those that are judged (tensors {strange[0][:12]})"
                fix = "give what 'draftquant parity --report' wrote of these drafts"
                raise GateError(report.path, what, fix=fix)
            if strange or not named or len(named) < len(report.drafts_sha256):
                warnings.append(
                    f"nothing shows that the findings of {report.path.name} are about the drafts"
                    " that are judged: it, or a measurement, does not record whose it is"
                )
        return tuple(warnings)
