"""`check`: what an engine will do with a draft folder, before a server is started.

And a copy of the folder with its config repaired.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.engines.contract import ENGINE_NAMES, TITLES, EngineCheck, EngineName, Verdict
from ...quantize.engines.registry import newest_engines
from ...quantize.errors import CheckpointError
from ...quantize.files.command_line import running_argv
from ...quantize.files.hub import DraftSource, resolve_draft, resolve_target
from ...quantize.files.staging import check_output
from ...quantize.gpus import gpu_names
from ...recipes.bounds import AT_LEAST_1
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
    from ...quantize.pairing import PairCheck
    from ...quantize.verify.folder_verification import VerifyReport


@dataclass(frozen=True, slots=True)
class CheckSettings(Settings):
    """Of which draft, in which engine, on which GPU; and whether a repaired copy is written."""

    draft: Annotated[Reference, Argument("draft, quantized or not: a folder or a Hub id", "DRAFT")]
    engine: Annotated[
        EngineName | None,
        Option("engine that will load the draft (default with --target: all of them)"),
    ] = None
    _: KW_ONLY
    version: Annotated[
        str | None, Option("version of the engine (default: the newest one known)", "VERSION")
    ] = None
    target: Annotated[
        Reference | None,
        Option(
            "the target that the draft is served beside: a folder or a Hub id, of which no weights"
            " are fetched; then the pair is checked, and the whole launch lines are printed",
            "TARGET",
        ),
    ] = None
    target_args: Annotated[
        str | None,
        Option(
            "flags of the target's launch line, in one string in quotes: quantization, dtype, dtype"
            " of the KV cache, length of the context, in any engine's spelling; with --target",
            "WORDS",
        ),
    ] = None
    traces: Annotated[
        arguments.AnyPath | None,
        Option(
            "traces of the target, whose hidden states are scanned for values beyond float16; with"
            " --target",
            "FOLDER",
        ),
    ] = None
    subtree: arguments.Subtree = None
    tp: Annotated[
        int | None,
        Option("tensor-parallel size (default 1)", "GPUS", bounds=AT_LEAST_1),
    ] = None
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

    exclusive = (("target", "target_layers"),)

    @override
    def check(self) -> None:
        if self.engine is None and (self.target is None or self.fix):
            what = "is missing" if self.target is None else "is missing, and --fix repairs for one"
            fix = f"add --engine {ENGINE_NAMES[0]}"
            ways = f"{fix} (or {', '.join(ENGINE_NAMES[1:])}), or --target TARGET for all engines"
            raise CheckpointError("--engine", what, fix=ways if self.target is None else fix)
        if self.engine is None and self.version is not None:
            what = "is of one engine, and all are asked"
            raise CheckpointError("--version", what, fix=f"add --engine {ENGINE_NAMES[0]}")
        of_pairs = {"target-args": self.target_args, "traces": self.traces, "subtree": self.subtree}
        given = next((name for name, value in of_pairs.items() if value is not None), None)
        if self.target is None and given is not None:
            what = "without --target, no pair is checked"
            raise CheckpointError(f"--{given}", what, fix="add --target TARGET")
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
        pair: what the engines do with the draft beside its target; None without `target=`.
    """

    answer: EngineCheck
    before: EngineCheck
    repaired: Repaired | None = None
    pair: "PairCheck | None" = None

    @property
    def verdict(self) -> Verdict:
        """LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN: of the pair, where a target is given."""
        return self.pair.verdict if self.pair is not None else self.answer.verdict

    @property
    def remedy(self) -> str | None:
        """What to do where it does not load, None where it does."""
        return self.pair.remedy if self.pair is not None else self.answer.remedy

    @property
    def exit_code(self) -> int:
        """0 LOADS, 1 LOADS BUT WRONG or REFUSED or WRONG against its source, 3 UNKNOWN."""
        if self.repaired is not None and self.repaired.is_refuted:
            return 1
        return {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        pair = {"pair": self.pair.to_mapping()} if self.pair is not None else {}
        if self.repaired is None:
            return self.pair.to_mapping() if self.pair is not None else _mapping(self.answer)
        before_and_after = {"before": _mapping(self.before), "after": _mapping(self.answer)}
        return {**before_and_after, **self.repaired.to_mapping(), **pair}

    @override
    def brief(self) -> Mapping[str, object]:
        repaired = self.repaired.report if self.repaired else None
        shown = self.pair.brief() if self.pair is not None else self.answer.brief()
        return {**shown, "repaired copy": repaired.out if repaired else None}


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
    source = resolve_draft(str(settings.draft), settings.subtree)
    before, pair = _answer(source.folder, settings, str(settings.draft))
    if not settings.fix or settings.out is None:
        return CheckReport(answer=before, before=before, pair=pair)
    repaired = _repair(source, Path(settings.out), settings)
    after = before
    if repaired.report:
        after, pair = _answer(Path(settings.out), settings, str(settings.out))
    return CheckReport(answer=after, before=before, repaired=repaired, pair=pair)


def _answer(
    folder: Path, settings: CheckSettings, named: str
) -> tuple[EngineCheck, "PairCheck | None"]:
    """Of the draft alone, in the first engine that is asked, and of the pair if there is one."""
    from ...quantize.engines import check_draft
    from ...quantize.gpus import architecture

    arch = architecture(settings.arch) if settings.arch else None
    if settings.target is not None:
        pair = _pair(folder, str(settings.target), arch, settings, named)
        return pair.engines[0].answer, pair
    assert settings.engine is not None  # `CheckSettings.check`
    answer = check_draft(
        folder,
        engine=settings.engine,
        version=settings.version,
        arch=arch,
        tp=settings.tp or 1,
        target_layers=settings.target_layers,
        asked=settings.arch,
    )
    return answer, None


def _pair(
    folder: Path, target: str, arch: str | None, settings: CheckSettings, named: str
) -> "PairCheck":
    from ...quantize.pairing import check_pair

    return check_pair(
        folder,
        resolve_target(target),
        engine=settings.engine,
        version=settings.version,
        arch=arch,
        tp=settings.tp,
        target_args=settings.target_args,
        asked=settings.arch,
        named=(named, target),
        subtree=settings.subtree,
        largest_feature=_largest_feature(settings.traces),
    )


def _largest_feature(traces: arguments.AnyPath | None) -> float | None:
    """The largest magnitude among recorded hidden states; None where no traces are given."""
    if traces is None:
        return None
    from ...calibration.traces.trace_folder import TraceFolder

    folder = TraceFolder.open(Path(traces))
    return max((float(prompt.features.abs().max()) for prompt in folder), default=0.0)


def _repair(source: DraftSource, out: Path, settings: CheckSettings) -> Repaired:
    """Plan, and write where there is something to repair."""
    from ...quantize.engines.repairs import plan_repairs, repair_draft
    from ...quantize.stored.declarations import raw_declaration
    from ...quantize.verify.folder_verification import verify

    against = resolve_draft(str(settings.against)).folder if settings.against else None
    assert settings.engine is not None  # `CheckSettings.check`
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
