"""A shipped pair and the drafts made of it, served in turns: what `validated` judges."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from served.drafts import Pair, record, record_by_engine
from served.recording import PORT
from served.serve import ENVIRONMENT

TESTS = Path(__file__).resolve().parents[1]
MAX_NEW_TOKENS = 64
PLAIN, BF16 = "none", "bf16"
JUDGED_AT = 8  # requests in flight


@dataclass(frozen=True, slots=True)
class Matrix:
    """Drafts that are served in turns, beside no draft and the BF16 one.

    Attributes:
        name: of its folder.
        concurrencies: requests in flight; where there are two, the baseline is measured twice.
    """

    name: str
    recipes: tuple[str, ...]
    num_prompts: int
    concurrencies: tuple[int, ...]

    @property
    def again(self) -> int | None:
        """At which concurrency the baseline is measured a second time."""
        return next((one for one in self.concurrencies if one != JUDGED_AT), None)


MATRICES = (
    Matrix("matrix", ("int4-channel", "int4-channel-gptq"), 48, (1, JUDGED_AT)),
    Matrix("fp8", ("fp8-ptpc",), 16, (JUDGED_AT,)),
)
"""FP8 on fewer prompts: vLLM's product on a CPU takes 10 ms per token and linear."""


@dataclass(frozen=True, slots=True)
class Validation:
    """One pair and one matrix, in a folder of work that all of the pair share."""

    pair: Pair
    matrix: Matrix
    work: Path
    python: Path

    @property
    def folder(self) -> Path:
        """Of the matrix."""
        return self.work / self.matrix.name

    @property
    def traces(self) -> Path:
        """Of the plain engine."""
        return self.folder.with_name(f"{self.matrix.name}-traces")

    @property
    def drafts(self) -> tuple[str, ...]:
        """The variants that draft."""
        return BF16, *self.matrix.recipes

    def measurement(self, variant: str, concurrency: int = JUDGED_AT) -> Path:
        """A cell of the matrix."""
        return self.folder / f"measurements/{variant}.c{concurrency}.r1.jsonl"

    def draft(self, variant: str) -> Path:
        """The folder that was served."""
        return self.pair.folder / "draft" if variant == BF16 else self.work / variant

    def again(self, option: str, variant: str) -> tuple[str, ...]:
        """The option that gives a second run of a baseline, where there is one."""
        concurrency = self.matrix.again
        return () if concurrency is None else (option, str(self.measurement(variant, concurrency)))

    def make(self) -> dict[str, Any]:
        """Everything that is compared, and how fast it was."""
        self.work.mkdir(parents=True, exist_ok=True)
        lines = (
            (self.pair.folder / "prompts.jsonl")
            .read_text(encoding="utf-8")
            .splitlines(keepends=True)
        )
        prompts = self.work / f"{self.matrix.name}-prompts.jsonl"
        prompts.write_text("".join(lines[: self.matrix.num_prompts]), encoding="utf-8")
        if not self.traces.exists():
            record_by_engine(self.python, self.pair, prompts, self.traces)
        for recipe in self.matrix.recipes:
            if not self.draft(recipe).exists():
                self._quantize(recipe)
        matrix = self.work / f"{self.matrix.name}.yaml"
        matrix.write_text(yaml.safe_dump(self._matrix(prompts), sort_keys=False), encoding="utf-8")
        return asked("measure", "--launch", str(matrix), "--out", str(self.folder), "--json")

    def _quantize(self, recipe: str) -> None:
        given: tuple[str, ...] = ()
        if recipe.endswith("-gptq"):
            calibration = self.work / "calibration"
            if not calibration.exists():
                record(self.pair, self.pair.folder / "calibration.jsonl", calibration)
            given = ("--traces", str(calibration))
        out = ("--out", str(self.draft(recipe)))
        asked("quantize", str(self.draft(BF16)), "--recipe", recipe, *given, *out, "--json")

    def _matrix(self, prompts: Path) -> dict[str, Any]:
        speculative = json.dumps({
            "method": self.pair.method,
            "model": "DRAFT",
            "num_speculative_tokens": self.pair.num_draft_tokens,
        })  # fmt: skip
        arguments = (
            f"--per-request-spec-decode-metrics detailed --speculative-config '{speculative}'"
        )
        drafts = {name: str(self.draft(name).resolve()) for name in self.drafts}
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
            "concurrencies": list(self.matrix.concurrencies),
            "repeats": 1,
            "variants": [
                {"name": PLAIN},
                *(
                    {"name": name, "draft": folder,
                     "arguments": arguments.replace("DRAFT", "{draft}")}
                    for name, folder in drafts.items()
                ),
            ],
        }  # fmt: skip


def asked(
    *arguments: str, expected: tuple[int, ...] = (0,), module: str = "draftquant.scripts.cli"
) -> dict[str, Any]:
    """The JSON of one `draftquant` command, run by a module.

    Raises:
        RuntimeError: it ended otherwise; the message has what it said.
    """
    command = (sys.executable, "-m", module, *arguments)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=TESTS, env=os.environ
    )
    if done.returncode not in expected:
        raise RuntimeError(
            f"draftquant {arguments[0]} ended with {done.returncode}:\n{done.stderr}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
