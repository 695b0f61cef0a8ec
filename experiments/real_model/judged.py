"""What is recorded with the target, and which quantized drafts are judged on it.

A row of `CASES` is one `draftquant quantize` and one `draftquant gate`. Its report stays in the
work folder, so that a further run makes what is missing.
"""

import itertools
import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftquant.scripts.cli import main
from drafts import DRAFTS
from states import AUX_LAYERS, NEW_TOKENS

from benchmarks.quality import AS_SHIPPED, JUDGED, is_calibrated

SIZES = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Traces of one file of prompts: of the first `count`, or of the first of one category."""

    prompts: str
    count: int
    category: str = ""
    options: tuple[str, ...] = ()


RECORDINGS = {
    "gate": Recording(prompts="gate", count=300),
    "calibration-16": Recording(prompts="calibration", count=16),
    "calibration-64": Recording(prompts="calibration", count=64),
    "calibration-256": Recording(prompts="calibration", count=256),
    "calibration-code": Recording(prompts="calibration", count=64, category="code"),
    "calibration-lists": Recording(prompts="calibration", count=64, category="lists"),
    "sampled-0.7": Recording(prompts="gate", count=300, options=("--temperature", "0.7")),
    "sampled-1": Recording(prompts="gate", count=300, options=("--temperature", "1")),
    "long-2048": Recording(prompts="long-2048", count=30),
    "long-8192": Recording(prompts="long-8192", count=8),
}


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
        options = [word.lstrip("-") for word in self.quantize if word != "--recipe"]
        return ".".join([*options, *([self.calibrated_on] if self.calibrated_on else [])])

    @property
    def name(self) -> str:
        """A name of the row."""
        options = [word.lstrip("-") for word in self.gate]
        return ".".join([self.draft, self.folder, self.judged_on, *options])


_RECIPES = (
    "fp8-ptpc", "mi325x-fp8", "int4-channel", "int4-group128", "mi325x-w4a8", "mxfp4-weights",
    "nvfp4-weights", "mi355-mxfp4", "blackwell-fp8", "int4-channel-gptq", "int4-group128-gptq",
    "mi325x-w4a8-gptq", "mxfp4-weights-gptq", "nvfp4-weights-gptq", "blackwell-nvfp4",
)  # fmt: skip


def _recipe(question: str, name: str, calibrated_on: str = "calibration-64", **more: Any) -> Case:
    seen = calibrated_on if is_calibrated(name, AS_SHIPPED) else ""
    return Case(question=question, quantize=("--recipe", name), calibrated_on=seen, **more)


def _cases() -> Iterator[Case]:
    for name in _RECIPES:
        yield _recipe("recipes", name)
    for seen in ("16", "64", "256", "code", "lists"):
        for name in ("int4-channel-gptq", "int4-group128-gptq"):
            yield _recipe("calibration", name, f"calibration-{seen}")
        yield _recipe("input scales", "blackwell-fp8", f"calibration-{seen}")
    yield Case(
        question="input scales", quantize=("--recipe", "blackwell-fp8", "--input-scale", "1")
    )
    for scales in ("unit", "absmax", "measured"):
        yield Case(
            question="KV cache",
            quantize=("--recipe", "fp8-ptpc", "--kv-cache", scales),
            calibrated_on="" if scales == "unit" else "calibration-64",
        )
    for name in ("fp8-ptpc-head", "int4-channel-gptq-head", "int4-group128-gptq-head"):
        yield _recipe("head", name)
    for heat in ("0.7", "1"):
        for how in ("greedy", "probabilistic"):
            for name in ("fp8-ptpc", "int4-channel-gptq"):
                gate = ("--draft-sampling", how)
                yield _recipe("sampled", name, judged_on=f"sampled-{heat}", gate=gate)
    for length in ("2048", "8192"):
        for name in ("fp8-ptpc", "int4-channel", "int4-channel-gptq"):
            yield _recipe("long texts", name, judged_on=f"long-{length}")
    for name in ("fp8-ptpc", "int4-channel-gptq"):
        yield _recipe("other drafts", name, draft="eagle3-whole")
    for draft in ("mla", "dflash"):
        for name in ("fp8-ptpc", "int4-channel", "int4-channel-gptq", "mxfp4-weights-gptq"):
            yield _recipe("other drafts", name, draft=draft)


CASES = tuple(_cases())


def record(target: Path, prompts: Path, out: Path) -> None:
    """Record what is missing."""
    for name, recording in RECORDINGS.items():
        if (out / name).exists():
            continue
        chosen = out / f"{name}.jsonl"
        lines = (prompts / f"{recording.prompts}.jsonl").read_text("utf-8").splitlines()
        if recording.category:
            lines = [x for x in lines if json.loads(x)["category"] == recording.category]
        chosen.write_text("\n".join(lines[: recording.count]) + "\n", encoding="utf-8")
        seconds = _run(
            "record", "--target", target, "--prompts", chosen, "--out", out / name,
            "--aux-layers", ",".join(map(str, AUX_LAYERS)), "--ignore-eos",
            "--max-new-tokens", NEW_TOKENS, *recording.options,
        )  # fmt: skip
        print(f"{name}: {seconds:.0f} CPU seconds", flush=True)


def judge(work: Path, target: Path, traces: Path) -> None:
    """Quantize and gate what is missing, each report in `work`/reports.

    A case whose draft or traces are still missing waits for a further run.
    """
    (work / "reports").mkdir(exist_ok=True)
    for case in CASES:
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
            _run("quantize", draft, *case.quantize, *seen, "--target", target, "--out", out)
        trained = DRAFTS[case.draft.removesuffix("-whole")]
        _run(
            "gate", draft, out, "--traces", traces / case.judged_on, "--target", target,
            "-k", trained.num_draft_tokens, *case.gate, "--report", report, judged=JUDGED,
        )  # fmt: skip


def rows(work: Path) -> list[dict[str, Any]]:
    """What the reports say, in the order of `CASES`: shares are fractions."""
    paths = {case.name: work / f"reports/{case.name}.json" for case in CASES}
    return [
        {"question": case.question, "name": case.name, **_figures(paths[case.name])}
        for case in CASES
        if paths[case.name].exists()
    ]


def _figures(path: Path) -> dict[str, Any]:
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


def curve(work: Path, draft: str, target: Path, traces: Path) -> list[dict[str, Any]]:
    """Acceptance by the number of rows, chosen by calibration text, with and without counts.

    A row is a size, a scope and an order: shares are fractions, bounds hold together. "off-domain"
    = rows that the prompts of the other categories choose.
    """
    found = []
    for name, counted in (("prompts", ()), ("counts", ("--counts", work / "counts.json"))):
        command = (
            sys.executable, "-m", "draftquant", "vocab", work / draft / "draft", "--curve",
            "--traces", traces / "calibration-256", "--judge", traces / "gate", "--target", target,
            "--sizes", ",".join(map(str, SIZES)), "--json", "--plot", work / f"curve-{name}.svg",
            *counted,
        )  # fmt: skip
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True)
        (work / f"curve-{name}.json").write_bytes(done.stdout)
        curves = json.loads(done.stdout)["curve"]
        for chosen in ("chosen", "off_domain"):
            rows = itertools.chain(curves[chosen]["whole"], *curves[chosen]["categories"])
            found += [
                {
                    "rows chosen by": name,
                    "off-domain": chosen == "off_domain",
                    **{key: row[key] for key in ("size", "scope", "coverage")},
                    "change": round(row["relative_change"], 5),
                    "bounds": [round(row["lower"], 5), round(row["upper"], 5)],
                }
                for row in rows
            ]
    return found


def _run(*words: object, judged: Sequence[int] = (0,)) -> float:
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
