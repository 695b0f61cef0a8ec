"""Validate drafts as a release manager would, on real vLLM servers: tests/served/MEASURED.md.

Usage: `.venv/bin/python tests/served/validated.py --python .venv-served/bin/python [--only FAMILY]`.

For each pair: a server without a draft, with the BF16 draft and with quantized ones, started in
turns (`measure --launch`), then `gate --measured`, `parity divergence` and `reconcile`.

Exit status 1: a difference between server and replay is not explained, or an output parts from the
plain one where no near tie explains it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import yaml  # noqa: E402
from served.drafts import SERVED_PAIRS, Pair, record, record_by_engine  # noqa: E402
from served.recording import PORT  # noqa: E402
from served.serve import ENVIRONMENT  # noqa: E402

RESULTS = HERE / "MEASURED.md"
RECIPES = ("int4-channel", "int4-channel-gptq", "fp8-ptpc")
NUM_PROMPTS, MAX_NEW_TOKENS = 48, 64
CONCURRENCIES, REPEATS = (1, 8), 3
PLAIN, BF16 = "none", "bf16"
JUDGED_AT = 8  # requests in flight


@dataclass(frozen=True, slots=True)
class Validation:
    """One pair in a folder of work."""

    pair: Pair
    work: Path
    python: Path

    @property
    def traces(self) -> Path:
        """Of the plain engine."""
        return self.work / "traces"

    def measurement(self, variant: str, *, repeat: int = 1, concurrency: int = JUDGED_AT) -> Path:
        """A cell of the matrix."""
        return self.work / f"matrix/measurements/{variant}.c{concurrency}.r{repeat}.jsonl"

    def draft(self, variant: str) -> Path:
        """The folder that was served."""
        return self.pair.folder / "draft" if variant == BF16 else self.work / variant

    def make(self) -> dict[str, Any]:
        """Everything that is compared, and how fast it was."""
        self.work.mkdir(parents=True, exist_ok=True)
        lines = (self.pair.folder / "prompts.jsonl").read_text().splitlines(keepends=True)
        prompts = self.work / "prompts.jsonl"
        prompts.write_text("".join(lines[:NUM_PROMPTS]))
        if not self.traces.exists():
            record_by_engine(self.python, self.pair, prompts, self.traces)
        for recipe in RECIPES:
            if not self.draft(recipe).exists():
                self._quantize(recipe)
        matrix = self.work / "matrix.yaml"
        matrix.write_text(yaml.safe_dump(self._matrix(prompts), sort_keys=False))
        launch = ("--launch", str(matrix), "--out", str(self.work / "matrix"), "--json")
        return _asked("measure", *launch)

    def _quantize(self, recipe: str) -> None:
        given: tuple[str, ...] = ()
        if recipe.endswith("-gptq"):
            calibration = self.work / "calibration"
            if not calibration.exists():
                record(self.pair, self.pair.folder / "calibration.jsonl", calibration)
            given = ("--traces", str(calibration))
        out = ("--out", str(self.draft(recipe)))
        _asked("quantize", str(self.draft(BF16)), "--recipe", recipe, *given, *out, "--json")

    def _matrix(self, prompts: Path) -> dict[str, Any]:
        speculative = json.dumps({
            "method": self.pair.method,
            "model": "DRAFT",
            "num_speculative_tokens": self.pair.num_draft_tokens,
        })  # fmt: skip
        arguments = f"--per-request-spec-decode-metrics detailed --speculative-config '{speculative}'"
        drafts = {name: str(self.draft(name).resolve()) for name in (BF16, *RECIPES)}
        return {
            "schema_version": 1,
            "engine": "vllm",
            "target": str(self.pair.folder / "target"),
            "prompts": str(prompts),
            "max_new_tokens": MAX_NEW_TOKENS,
            "ignore_eos": True,
            "num_top_logprobs": 2,
            "command": f"{self.python} -m vllm.entrypoints.openai.api_server --model {{target}}"
            " --port {port} --enforce-eager --max-model-len 512 --max-num-seqs 16"
            " --no-enable-prefix-caching",
            "environment": ENVIRONMENT | {"VLLM_PLUGINS": ""},
            "port": PORT,
            "concurrencies": list(CONCURRENCIES),
            "repeats": REPEATS,
            "variants": [
                {"name": PLAIN},
                *(
                    {"name": name, "draft": folder,
                     "arguments": arguments.replace("DRAFT", "{draft}")}
                    for name, folder in drafts.items()
                ),
            ],
        }  # fmt: skip


def rows(validation: Validation, speed: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each draft, and as its last item what is wrong."""
    path = validation.measurement
    for variant in (BF16, *RECIPES):
        held = _asked(
            "reconcile", str(validation.traces), str(path(variant)),
            *("--draft", str(validation.draft(variant)), "--json"), expected=(0, 1, 3),
        )  # fmt: skip
        audit = _asked(
            "parity", "divergence", str(path(PLAIN)), str(path(variant)),
            *("--plain-again", str(path(PLAIN, concurrency=1)), "--json"), expected=(0, 1, 3),
        )  # fmt: skip
        judged = {}
        if variant != BF16:
            judged = _asked(
                "gate", "--measured", str(path(BF16)), str(path(variant)),
                *("--baseline-again", str(path(BF16, repeat=2)), "--json"), expected=(0, 1, 3),
            )  # fmt: skip
        yield _row(variant, held, audit, judged, speed)


def _row(
    variant: str,
    held: dict[str, Any],
    audit: dict[str, Any],
    judged: dict[str, Any],
    speed: dict[str, Any],
) -> tuple[str, ...]:
    outcomes = Counter(prompt["outcome"] for prompt in held["prompts"])
    print(variant, outcomes, audit, judged.get("verdict"), json.dumps(speed)[:300], flush=True)
    return (variant,)


def _asked(*arguments: str, expected: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The JSON of one `draftquant` command.

    Raises:
        RuntimeError: it ended otherwise; the message has what it said.
    """
    command = (sys.executable, "-m", "draftquant.scripts.cli", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode not in expected:
        raise RuntimeError(f"draftquant {arguments[0]} ended with {done.returncode}:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep everything in")
    parser.add_argument("--only", nargs="*", help="families")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for pair in SERVED_PAIRS:
            if options.only and pair.family not in options.only:
                continue
            validation = Validation(pair, work / pair.family, options.python)
            speed = validation.make()
            for row in rows(validation, speed):
                print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
