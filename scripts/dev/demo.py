"""The demo: quantize the shipped pair three times, and let the gate judge each draft.

`./scripts/demo` sets everything up and runs this. Each step is one `draftquant` command, printed as
a user would type it; everything runs offline, in a folder that is removed at the end.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from ...recipes import load_recipe
from ...validate.report.document import Judgement, read_report
from ..cli import main as draftquant
from ..frame.console import stdout
from . import PAIRS

PAIR = PAIRS / "eagle3-llama"
RECIPES = {"fp8": "fp8-ptpc", "int4": "mi325x-w4a8-fp8", "fp4": "blackwell-nvfp4"}
VERDICTS = (0, 1, 3)
"""Exit codes of a gate that judged."""


def main() -> int:
    """Run every step; returns 0 when all of them ran, whatever the verdicts are."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave it there")
    parser.add_argument("--pair", type=Path, default=PAIR, help="folder of a trained pair")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.keep:
        options.keep.mkdir(parents=True)
        verdicts = _steps(options.pair, options.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="draftquant-demo-") as folder:
            verdicts = _steps(options.pair, Path(folder))
    out = stdout()
    out.line("verdicts", style="bold")
    for name, judgement in verdicts.items():
        out.line(f"{name} ({RECIPES[name]}) {judgement.verdict}: {judgement.reason}")
    if options.keep:
        pages = ", ".join(f"{options.keep}/{name}.html" for name in RECIPES)
        out.line(f"These pages show the verdicts in a browser: {pages}")
    out.line(f"The demo took {time.perf_counter() - began:.0f} s.")
    return 0


def _steps(pair: Path, work: Path) -> dict[str, Judgement]:
    """The demo's commands; returns what the gate says about each quantized draft."""
    pair = Path(os.path.relpath(pair))
    draft, target = str(pair / "draft"), str(pair / "target")
    traces, calibration = str(work / "traces"), str(work / "calibration")
    os.environ["DRAFTQUANT_CACHE"] = str(work / "cache")  # the demo leaves nothing elsewhere
    _run("inspect", draft)
    _run("plan", draft, "--recipe", RECIPES["fp8"])
    # With the target's tables, so that a draft without embedding and head needs only the traces.
    record = ("record", "--target", target, "--draft", draft, "--tables")
    _run(*record, "--prompts", str(pair / "prompts.jsonl"), "--out", traces)
    _run(*record, "--prompts", str(pair / "calibration.jsonl"), "--out", calibration)
    quantized = {name: str(work / name) for name in RECIPES}
    for name, recipe in RECIPES.items():
        needed = ("--traces", calibration) if load_recipe(recipe).needs_input_scales else ()
        options = ("--out", quantized[name], "--fix-config", *needed)
        _run("quantize", draft, "--recipe", recipe, *options)
    for folder in quantized.values():
        _run("verify", folder, "--against", draft)
    _run("check", quantized["fp8"], "--engine", "vllm", "--gpu", "h200")
    _run("replay", draft, *quantized.values(), "--traces", traces)
    reports = {name: work / f"{name}.json" for name in RECIPES}
    for name, folder in quantized.items():
        written = ("--report", str(reports[name]), "--html", str(work / f"{name}.html"))
        _run("gate", draft, folder, "--traces", traces, *written, expected=VERDICTS)
    return {name: read_report(path).judgement for name, path in reports.items()}


def _run(*arguments: str, expected: tuple[int, ...] = (0,)) -> None:
    """Print and run one `draftquant` command; stop the demo if it fails."""
    stdout().line("")
    stdout().line(f"$ draftquant {shlex.join(arguments)}", style="bold cyan")
    code = draftquant(arguments)
    if code not in expected:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
