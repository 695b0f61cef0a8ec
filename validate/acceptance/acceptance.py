"""What the steps of an acceptance found, and the worst verdict of those that judge.

It knows neither how a step is carried out nor where its output lies.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from ...recipes.brief import Brief, counted
from ..judging.judgement import GateReport
from ..judging.verdict import EXIT_CODES, Verdict, worst
from ..parity.finding import Finding
from ..report.document import Document, document_of
from ..served.joint_report import JointReport, joint_report

FORMAT, FORMAT_VERSION = "draftquant acceptance", 1
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS", "DONE", "NOT RUN"]
"""A verdict; DONE: of a step that makes something, and judges nothing."""
VERDICTS: Mapping[Outcome, Verdict] = {
    "PASS": "PASS",
    "FAIL": "FAIL",
    "INCONCLUSIVE": "INCONCLUSIVE",
    "ANOMALOUS": "ANOMALOUS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFound:
    """What one step of an acceptance found.

    Attributes:
        name: of the verb behind it, and on what where it runs more than once.
        outcome: a verdict, DONE or NOT RUN.
        said: what was found, in a sentence or two.
        output: what it wrote, by its name in the folder; None where there is nothing.
        details: more lines.
        action: what to do about it; None where there is nothing to do.
    """

    name: str
    outcome: Outcome
    said: str
    output: str | None = None
    details: tuple[str, ...] = ()
    action: str | None = None

    @property
    def verdict(self) -> Verdict | None:
        """None where it judges nothing."""
        return VERDICTS.get(self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Acceptance(Brief):
    """What all steps found, and whether the draft is accepted.

    Attributes:
        draft: name of the BF16 draft. quantized: name of the one that is to replace it.
        folder: where everything lies.
        steps: in their order; those that were not carried out too.
        document: the report of the gate, with what parity found and judged; None where the gate
            was not reached.
        figures: of parity that have no limit; they enter no verdict.
        dry_run: nothing was carried out, and nothing is judged that was not judged before.
    """

    draft: str
    quantized: str
    folder: Path
    steps: tuple[StepFound, ...]
    document: Document | None = None
    figures: tuple[Finding, ...] = ()
    dry_run: bool = False

    @property
    def judged(self) -> tuple[StepFound, ...]:
        """The steps that have a verdict."""
        return tuple(step for step in self.steps if step.verdict is not None)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of all steps; None before one has judged."""
        verdicts = [step.verdict for step in self.steps if step.verdict is not None]
        return worst(verdicts) if verdicts else None

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS; 0 of a dry run."""
        return 0 if self.dry_run or self.verdict is None else EXIT_CODES[self.verdict]

    @property
    def reason(self) -> str:
        """What the steps say that decide."""
        told = [step for step in self.judged if step.verdict == self.verdict]
        if self.verdict == "PASS":
            names = ", ".join(step.name for step in told[:-1])
            last = told[-1]
            return f"{names}{' and ' if names else ''}{last.name} passed. {last.said}"
        return " ".join(f"{step.name}: {step.said}" for step in told)

    @property
    def action(self) -> str | None:
        """What to do, by the first step that decides and says so."""
        ways = (step.action for step in self.judged if step.verdict == self.verdict)
        return next((way for way in ways if way), None)

    @property
    def page(self) -> Path:
        """The page; there is none before the report is written."""
        return self.folder / "acceptance.html"

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "draft": self.draft,
            "quantized": self.quantized,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reason": self.reason if self.verdict else "",
            "action": self.action,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "figures": [dataclasses.asdict(one) for one in self.figures],
            "gate": None if self.document is None else _mapping_of(self.document),
        }

    @override
    def brief(self) -> Mapping[str, object]:
        done = sum(step.outcome != "NOT RUN" for step in self.steps)
        return {
            "verdict": self.verdict or "not judged yet",
            "draft": self.quantized,
            "against": self.draft,
            "steps": f"{done} of {counted(len(self.steps), 'step')} done",
            "reason": self.reason if self.verdict else None,
            "folder": self.folder,
        }


def with_parity(document: Document, findings: Sequence[Finding]) -> Document:
    """The gate's report with findings of parity beside it; the worst verdict of all counts."""
    if not findings:
        return document
    found, more = document.judgement, tuple(findings)
    if isinstance(found, JointReport):
        joined = joint_report(
            served=found.served,
            replayed=found.replayed,
            noise=found.noise,
            parity=found.parity + more,
        )
    elif isinstance(found, GateReport) and found.served is not None:
        joined = joint_report(served=found, parity=more)
    else:
        joined = joint_report(replayed=found, parity=more)
    return dataclasses.replace(document, judgement=joined)


def _mapping_of(document: Document) -> dict[str, Any]:
    header, judgement = document.header, document.judgement
    return document_of(
        judgement,
        argv=header.argv,
        drafts=header.drafts,
        engines=header.engines,
        date=header.date,
    )
