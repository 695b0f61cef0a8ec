"""What is recorded with a real target, and which quantized drafts are judged on it.

A case is one `draftquant quantize` and one `draftquant gate`. Its report stays in the work folder,
so that a further run makes what is missing.
"""

import json
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftquant.scripts.cli import main

from benchmarks.quality import AS_SHIPPED, JUDGED, is_calibrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Traces of one file of prompts: of the first `count`, or of the first of one category."""

    prompts: str
    count: int
    category: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A draft that is judged.

    Attributes:
        question: what the row answers: the rows of one question make one table.
        draft: the BF16 draft, by the name of its folder.
        quantize: options of `quantize` after the draft.
        calibrated_on: the traces that `quantize` sees; "" = none.
        gate: further options of `gate`.
        judged_on: the traces that `gate` replays.
    """

    question: str
    draft: str = "eagle3"
    quantize: tuple[str, ...]
    calibrated_on: str = ""
    gate: tuple[str, ...] = ()
    judged_on: str = "gate"

    @property
    def folder(self) -> str:
        """A name of the quantized draft."""
        words = (Path(word).stem if word.endswith(".yaml") else word for word in self.quantize)
        options = [word.lstrip("-") for word in words if word != "--recipe"]
        return ".".join([*options, *([self.calibrated_on] if self.calibrated_on else [])])

    @property
    def name(self) -> str:
        """A name of the row."""
        options = [word.lstrip("-") for word in self.gate]
        return ".".join([self.draft, self.folder, self.judged_on, *options])


def of_recipe(question: str, name: str, calibrated_on: str = "calibration-64", **more: Any) -> Case:
    """The case of a built-in recipe, calibrated where it needs that."""
    seen = calibrated_on if is_calibrated(name, AS_SHIPPED) else ""
    return Case(question=question, quantize=("--recipe", name), calibrated_on=seen, **more)


def record(
    recordings: Mapping[str, Recording], target: Path, prompts: Path, out: Path, *options: object
) -> None:
    """Record what is missing, each with these options of `record`."""
    for name, recording in recordings.items():
        if (out / name).exists():
            continue
        chosen = out / f"{name}.jsonl"
        lines = (prompts / f"{recording.prompts}.jsonl").read_text("utf-8").splitlines()
        if recording.category:
            lines = [x for x in lines if json.loads(x)["category"] == recording.category]
        chosen.write_text("\n".join(lines[: recording.count]) + "\n", encoding="utf-8")
        seconds = run(
            "record", "--target", target, "--prompts", chosen, "--out", out / name,
            *options, *recording.options,
        )  # fmt: skip
        print(f"{name}: {seconds:.0f} CPU seconds", flush=True)


def judge(
    cases: Sequence[Case], work: Path, target: Path, traces: Path, depths: Mapping[str, int]
) -> None:
    """Quantize and gate what is missing, each report in `work`/reports.

    A case whose draft or traces are still missing waits for a further run.

    Args:
        depths: K of each draft.
    """
    (work / "reports").mkdir(exist_ok=True)
    for case in cases:
        report, draft = work / f"reports/{case.name}.json", work / case.draft / "draft"
        needed = [draft, *(traces / name for name in (case.judged_on, case.calibrated_on))]
        if report.exists():
            continue
        if not all(path.exists() for path in needed):
            print(f"{case.name} waits", flush=True)
            continue
        out = work / case.draft / case.folder
        if not out.exists():
            seen = ("--traces", traces / case.calibrated_on) if case.calibrated_on else ()
            run("quantize", draft, *case.quantize, *seen, "--target", target, "--out", out)
        run(
            "gate", draft, out, "--traces", traces / case.judged_on, "--target", target,
            "-k", depths[case.draft], *case.gate, "--report", report, judged=JUDGED,
        )  # fmt: skip


def rows(cases: Sequence[Case], work: Path) -> list[dict[str, Any]]:
    """What the reports say, in the order of the cases: shares are fractions."""
    found = [(case, work / f"reports/{case.name}.json") for case in cases]
    found = [(case, path) for case, path in found if path.exists()]
    return [{"question": c.question, "name": c.name, **figures(path)} for c, path in found]


def write_rows(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """JSON with a row a line."""
    lines = ",\n".join(json.dumps(row) for row in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def figures(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text(encoding="utf-8"))
    bounds = [math.expm1(report["change"][side]) for side in ("lower", "upper")]
    lengths = [f"{side}_mean_acceptance_length" for side in ("baseline", "candidate")]
    return {
        "bf16": round(report["baseline"]["mean_acceptance_length"], 4),
        "quantized": round(report["candidate"]["mean_acceptance_length"], 4),
        "change": round(report["relative_change"], 5),
        "bounds": [round(bound, 5) for bound in bounds],
        "verdict": report["verdict"],
        "categories": {
            one["category"]: [round(one[length], 4) for length in lengths]
            for one in report["categories"]
        },
    }


def run(*words: object, judged: Sequence[int] = (0,)) -> float:
    """Run a command of draftquant; its CPU seconds."""
    began = _cpu_seconds()
    arguments = [str(word) for word in words]
    code = main([*arguments, "--quiet"])
    if code not in judged:
        raise SystemExit(f"draftquant {' '.join(arguments)}: exit code {code}")
    return _cpu_seconds() - began


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
