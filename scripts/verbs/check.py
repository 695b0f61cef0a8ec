"""`check`: what an engine will do with a draft folder, before a server is started."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.engines.contract import ENGINE_NAMES, TITLES, EngineCheck, EngineName, Verdict
from ...quantize.engines.versions import newest_engines
from ...quantize.files.hub import Reference, resolve_draft, resolve_target
from ...quantize.gpus import gpu_names
from ...recipes.brief import Brief
from ...recipes.decode import AT_LEAST_1
from ...recipes.errors import CheckpointError
from ..frame import arguments
from ..frame.console import print_json, print_table, stdout, table
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...quantize.drafts.engine_traits import Stage
    from ...quantize.engines.contract import Verdict
    from ...quantize.pairing import EnginePair, PairCheck, PairFinding

_DEFAULT_GPUS = "; ".join(
    f"{gpu_names(each.archs)} in {TITLES[each.name]}" for each in newest_engines()
)
"""Those of which one answer is given where none is named."""


@dataclass(frozen=True, slots=True)
class CheckSettings(Settings):
    """Of which draft, in which engine, on which GPU."""

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
    gpu: Annotated[
        str | None,
        Option(
            "GPU such as mi325x, h200 or b200, or architecture such as gfx942, sm90 "
            f"or sm100 (default: {_DEFAULT_GPUS})",
            "GPU",
        ),
    ] = None

    exclusive = (("target", "target_layers"),)

    @override
    def check(self) -> None:
        if self.engine is None and self.target is None:
            others = ", ".join(ENGINE_NAMES[1:])
            raise CheckpointError(
                "--engine",
                "is missing",
                fix=f"add --engine {ENGINE_NAMES[0]} (or {others}), or --target TARGET for all"
                " engines",
            )
        if self.engine is None and self.version is not None:
            what = "is of one engine, and all are asked"
            raise CheckpointError("--version", what, fix=f"add --engine {ENGINE_NAMES[0]}")
        of_pairs = {"target-args": self.target_args, "traces": self.traces, "subtree": self.subtree}
        given = next((name for name, value in of_pairs.items() if value is not None), None)
        if self.target is None and given is not None:
            what = "without --target, no pair is checked"
            raise CheckpointError(f"--{given}", what, fix="add --target TARGET")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(Brief):
    """What an engine does with a draft.

    Attributes:
        answer: the engine's answer.
        pair: what the engines do with the draft beside its target; None without `target=`.
    """

    answer: EngineCheck
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
        """0 LOADS, 1 LOADS BUT WRONG or REFUSED, 3 UNKNOWN."""
        return {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self.pair.to_mapping() if self.pair is not None else _mapping(self.answer)

    @override
    def brief(self) -> Mapping[str, object]:
        return self.pair.brief() if self.pair is not None else self.answer.brief()


@verb(CheckSettings)
def check(settings: CheckSettings) -> CheckReport:
    """Predict what an engine does with a draft, quantized or not. No engine and no GPU is needed.

    Example:
        >>> answer = dq.check("OUT", "vllm", gpu="h200")
        >>> answer.verdict, answer.remedy
        ('LOADS', None)

    Returns:
        The engine's answer (LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN), the reasons, and what to
        do.

    Raises:
        CheckpointError: the folder holds no draft, or there is no engine or GPU of this name.
    """
    source = resolve_draft(str(settings.draft), settings.subtree)
    answer, pair = _answer(source.folder, settings, str(settings.draft))
    return CheckReport(answer=answer, pair=pair)


def _answer(
    folder: Path, settings: CheckSettings, named: str
) -> tuple[EngineCheck, "PairCheck | None"]:
    """Of the draft alone, in the first engine that is asked, and of the pair if there is one."""
    from ...quantize.engines import check_draft
    from ...quantize.gpus import architecture

    arch = architecture(settings.gpu) if settings.gpu else None
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
        asked=settings.gpu,
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
        asked=settings.gpu,
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


def _mapping(answer: EngineCheck) -> dict[str, Any]:
    findings = [finding._asdict() for finding in answer.findings]
    return {**dataclasses.asdict(answer), "findings": findings}


# ---- Prints what engines do with a draft beside its target, and the commands that serve the two

_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}
_WORDS = {"refused": "error"}
"""Levels that are not said by their names."""


def print_pair(pair: "PairCheck") -> None:
    """What holds in every engine, then each engine's verdict, reasons and command."""
    out = stdout()
    common = [finding for finding in pair.findings if finding.engine is None]
    if common:
        out.line(("in every engine", "bold"))
        _print_findings(common)
    for each in pair.engines:
        _print_engine(each)
    sizes = ", ".join(map(str, pair.tensor_parallel))
    out.line(("tensor parallel: ", "bold"), f"draft and target can both be split over {sizes} GPUs")
    for text in pair.not_compared:
        out.line(("not compared: ", "bold"), text)


def _print_engine(pair: "EnginePair") -> None:
    out, alone = stdout(), pair.answer
    where = alone.gpu if alone.tp == 1 else f"{alone.tp} x {alone.gpu}"
    colour = f"bold {_COLOURS[pair.verdict]}"
    out.line((pair.verdict, colour), f": {alone.title} on {where}")
    for finding in alone.findings:
        out.line(f"  the draft alone: {finding.text}")
        out.line(f"    what to do: {finding.remedy}")
    for note in alone.notes:
        out.line(f"  note: {note}")
    _print_findings(finding for finding in pair.findings if finding.engine is not None)
    if pair.launch and pair.verdict in ("LOADS", "UNKNOWN"):
        out.line(f"  {'serve' if pair.verdict == 'LOADS' else 'try'} it: {pair.launch}")
        if alone.launch_note:
            out.line(f"    {alone.launch_note}")


def _print_findings(findings: "Iterable[PairFinding]") -> None:
    out = stdout()
    for finding in findings:
        out.line(f"  {_WORDS.get(finding.level, finding.level)}: {finding.text}")
        if finding.remedy:
            out.line(f"    what to do: {finding.remedy}")


# ---- `draftquant check`: prints what an engine will do with a draft folder

VERB = check
EPILOG = "exit codes: 0 LOADS, 1 LOADS BUT WRONG or REFUSED, 2 bad input, 3 UNKNOWN"
_CHECK_COLOURS = {"LOADS": "green", "LOADS BUT WRONG": "red", "REFUSED": "red", "UNKNOWN": "yellow"}
_VERDICTS: Mapping["Verdict", str] = {
    "LOADS": "{engine} loads this draft on {where}.",
    "LOADS BUT WRONG": "{engine} loads this draft on {where} without an error, and serves it"
    " wrongly: few of its tokens would be accepted.",
    "REFUSED": "{engine} ends with an error when it loads this draft on {where}.",
    "UNKNOWN": "it is not known what {engine} does with this draft on {where}.",
}
_WHEN: Mapping["Stage", str] = {
    "config": " (reading config.json)",
    "init": " (building the model)",
    "load": " (loading the tensors)",
    "unknown": "",
    "wrong": "",
    "after load": " (after loading)",
}
"""What an engine was doing when it found a fault."""


def run(options: argparse.Namespace) -> int:
    """Check, and print the engine's answer; 1 where it refuses or reads otherwise."""
    report = check.run(options.settings)
    if options.json:
        print_json(report.to_mapping())
        return report.exit_code
    if report.pair is not None:
        print_pair(report.pair)
    else:
        _print(report.answer)
    return report.exit_code


def _print(answer: "EngineCheck") -> None:
    out = stdout()
    where = answer.gpu if answer.tp == 1 else f"{answer.tp} x {answer.gpu}"
    if answer.layers:
        found = table(f"{answer.title} on {where}", "module in the engine", "taken as",
                      "parameter", "shape", "filled by", spare=("shape", "taken as"))  # fmt: skip
        for layer in answer.layers:
            head = (layer.module, layer.scheme or "not quantized")
            for parameter in layer.parameters:
                tensors = ", ".join(parameter.tensors) or "nothing"
                found.row(*head, parameter.name, str(list(parameter.shape)), tensors)
                head = ("", "")
        print_table(found)
    verdict = (answer.verdict, f"bold {_CHECK_COLOURS[answer.verdict]}")
    sentence = _VERDICTS[answer.verdict].format(engine=answer.title, where=where)
    findings = list(answer.findings)
    if answer.by_gpu:
        differs, *findings = findings
        remedy = differs.remedy[:1].upper() + differs.remedy[1:]
        out.line((f"{differs.text}. {remedy}.", f"bold {_CHECK_COLOURS['UNKNOWN']}"))
    else:
        out.line(verdict, f": {sentence}")
    for finding in findings:
        out.line(f"  why{_WHEN[finding.stage]}: {finding.text}")
        out.line(f"    what to do: {finding.remedy}")
    for note in answer.notes:
        out.line(f"  note: {note}")
    if answer.evidence:
        out.line(f"  how this is known: {answer.evidence}")
    if answer.launch and answer.verdict in ("LOADS", "UNKNOWN"):
        out.line(f"{'serve' if answer.verdict == 'LOADS' else 'try'} it: {answer.launch}")
        if answer.launch_note:
            out.line(f"  {answer.launch_note}")
