"""`check`: what an engine will do with a draft folder, before a server is started.

And a copy of the folder with its config repaired.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.engines.contract import TITLES, EngineCheck, EngineName, Verdict
from ...quantize.engines.registry import newest_engines
from ...quantize.errors import CheckpointError
from ...quantize.files.command_line import running_argv
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.files.staging import check_output
from ...quantize.gpus import gpu_names
from ...recipes.brief import Brief
from . import arguments
from .option import Argument, Option
from .references import Reference
from .settings import Settings
from .verb import verb

_DEFAULT_GPUS = "; ".join(
    f"{gpu_names(each.archs)} in {TITLES[each.name]}" for each in newest_engines()
)
"""Those of which one answer is given where none is named."""

if TYPE_CHECKING:
    from ...quantize.engines.repairs import RepairPlan, RepairReport
    from ...quantize.verify.folder_verification import VerifyReport


@dataclass(frozen=True, slots=True)
class CheckSettings(Settings):
    """Of which draft, in which engine, on which GPU; and whether a repaired copy is written."""

    draft: Annotated[Reference, Argument("draft, quantized or not: a folder or a Hub id", "DRAFT")]
    engine: Annotated[EngineName, Option("engine that will load the draft")]
    _: KW_ONLY
    version: Annotated[
        str | None, Option("version of the engine (default: the newest one known)", "VERSION")
    ] = None
    tp: Annotated[int, Option("tensor-parallel size (default 1)", "GPUS")] = 1
    target_layers: Annotated[
        int | None,
        Option(
            "number of decoder layers of the target; vLLM numbers the draft's layers after them",
            "LAYERS",
        ),
    ] = None
    arch: Annotated[
        str | None,
        Option(
            "GPU such as mi325x, h200 or b200, or architecture such as gfx942, sm90 "
            f"or sm100 (default: {_DEFAULT_GPUS})",
            "GPU",
        ),
    ] = None
    fix: Annotated[bool, Option("write a copy with a repaired config.json; needs --out")] = False
    out: Annotated[arguments.AnyPath | None, Option("folder to create for --fix", "FOLDER")] = None
    against: Annotated[
        Reference | None,
        Option(
            "the draft that DRAFT was quantized from; with it the values are compared"
            " too, and the order of packed INT4 is verified",
            "BF16",
        ),
    ] = None

    @override
    def check(self) -> None:
        if self.fix and self.out is None:
            raise CheckpointError(
                "--fix",
                "writes a new folder, never into DRAFT, and no folder is given",
                fix="add --out FOLDER",
            )
        if not self.fix and (self.out or self.against):
            given = "--out" if self.out else "--against"
            raise CheckpointError(given, "without --fix, nothing is written", fix="add --fix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was wrong with a folder, and what was written into the repaired copy.

    Attributes:
        report: None where there was nothing to repair.
        verification: of the repaired folder, or of DRAFT where nothing was written, against the
            draft that it was made from; None without one, and where there are no codes to verify.
    """

    plan: "RepairPlan"
    report: "RepairReport | None"
    verification: "VerifyReport | None"

    @property
    def is_refuted(self) -> bool:
        """True if `verify` says no."""
        return self.verification is not None and not self.verification.ok

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "out": str(self.report.out) if self.report else None,
            "repairs": [dataclasses.asdict(repair) for repair in self.plan.repairs],
            "notes": list(self.plan.notes),
            "verification": self.verification.to_mapping() if self.verification else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(Brief):
    """What an engine does with a draft.

    Attributes:
        answer: the engine's answer; of the repaired copy, where one was written.
        before: the engine's answer for the draft as it was given.
        repaired: what was repaired, and where the copy is; None without `fix=True`.
    """

    answer: EngineCheck
    before: EngineCheck
    repaired: Repaired | None = None

    @property
    def verdict(self) -> Verdict:
        """LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN."""
        return self.answer.verdict

    @property
    def remedy(self) -> str | None:
        """What to do where it does not load, None where it does."""
        return self.answer.remedy

    @property
    def exit_code(self) -> int:
        """0 LOADS, 1 LOADS BUT WRONG or REFUSED or WRONG against its source, 3 UNKNOWN."""
        if self.repaired is not None and self.repaired.is_refuted:
            return 1
        return {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.repaired is None:
            return _mapping(self.answer)
        before_and_after = {"before": _mapping(self.before), "after": _mapping(self.answer)}
        return {**before_and_after, **self.repaired.to_mapping()}

    @override
    def brief(self) -> Mapping[str, object]:
        repaired = self.repaired.report if self.repaired else None
        return {**self.answer.brief(), "repaired copy": repaired.out if repaired else None}


@verb(CheckSettings)
def check(settings: CheckSettings) -> CheckReport:
    """Predict what an engine does with a draft, quantized or not. No engine and no GPU is needed.

    Example:
        >>> answer = dq.check("OUT", "vllm", arch="h200")
        >>> answer.verdict, answer.remedy
        ('LOADS', None)

    Returns:
        The engine's answer (LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN), the reasons, and what to
        do.

    Raises:
        CheckpointError: the folder holds no draft, or there is no engine or GPU of this name.
        OutputError: the folder of the repaired copy exists already or cannot be written.
    """
    if settings.fix and settings.out is not None:
        check_output(Path(settings.out))
    source = resolve_draft(str(settings.draft))
    before = _answer(source.folder, settings)
    if not settings.fix or settings.out is None:
        return CheckReport(answer=before, before=before)
    repaired = _repair(source, Path(settings.out), settings)
    after = _answer(Path(settings.out), settings) if repaired.report else before
    return CheckReport(answer=after, before=before, repaired=repaired)


def _answer(folder: Path, settings: CheckSettings) -> EngineCheck:
    from ...quantize.engines import check_draft
    from ...quantize.gpus import architecture

    return check_draft(
        folder,
        engine=settings.engine,
        version=settings.version,
        arch=architecture(settings.arch) if settings.arch else None,
        tp=settings.tp,
        target_layers=settings.target_layers,
        asked=settings.arch,
    )


def _repair(source: DraftSource, out: Path, settings: CheckSettings) -> Repaired:
    """Plan, and write where there is something to repair."""
    from ...quantize.engines.repairs import plan_repairs, repair_draft
    from ...quantize.stored.declarations import raw_declaration
    from ...quantize.verify.folder_verification import verify

    against = resolve_draft(str(settings.against)).folder if settings.against else None
    plan = plan_repairs(
        source.folder,
        engine=settings.engine,
        version=settings.version,
        target_layers=settings.target_layers,
        against=against,
    )
    if plan.repairs:
        report = repair_draft(plan, out, source=source, argv=running_argv())
        return Repaired(plan=plan, report=report, verification=report.verification)
    if against is None or raw_declaration(plan.source) is None:
        return Repaired(plan=plan, report=None, verification=None)
    verification = verify(source.folder, against, foreign=True)
    return Repaired(plan=plan, report=None, verification=verification)


def _mapping(answer: EngineCheck) -> dict[str, Any]:
    findings = [finding._asdict() for finding in answer.findings]
    return {**dataclasses.asdict(answer), "findings": findings}
