"""Validate drafts as a release manager would, on real vLLM servers: tests/served/MEASURED.md.

Usage: `.venv/bin/python tests/served/validated.py --python .venv-served/bin/python`, and to try one
pair alone `--only FAMILY`.

For each pair: a server without a draft, with the BF16 draft and with quantized ones, started in
turns (`measure --launch`), then `gate --measured`, `parity divergence` and `reconcile`.

Exit status 1: a difference between server and replay is not explained, or an output parts from the
plain one where no near tie explains it.
"""

import argparse
import json
import math
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
RECIPES = ("int4-channel", "int4-channel-gptq")
"""Not FP8: vLLM's product on a CPU takes 10 ms per token and linear."""
NUM_PROMPTS, MAX_NEW_TOKENS = 48, 64
CONCURRENCIES = (1, 8)
PLAIN, BF16 = "none", "bf16"
JUDGED_AT = 8  # requests in flight
HEAD = f"""# Drafts validated on real servers

Written by `tests/served/validated.py`: vLLM on a CPU serves each pair without a draft, with the
BF16 draft and with quantized ones; {NUM_PROMPTS} prompts of {MAX_NEW_TOKENS} tokens, greedy, two
busy cores, so that speeds say little. Replay is on what the same engine records without a draft;
rounds in common text are compared, each at its own place, and a prompt is equal, explained, or
neither (`draftquant reconcile`; of DFlash some rounds differ where the draft's logits are 0.1 to
0.4 apart, the same ones at 1 and 8 in flight: why is open). Texts as plain: outputs equal to
those without a draft (`draftquant parity divergence`).

"""


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

    def measurement(self, variant: str, concurrency: int = JUDGED_AT) -> Path:
        """A cell of the matrix."""
        return self.work / f"matrix/measurements/{variant}.c{concurrency}.r1.jsonl"

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
        arguments = (
            f"--per-request-spec-decode-metrics detailed --speculative-config '{speculative}'"
        )
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


@dataclass(frozen=True, slots=True)
class Row:
    """One served draft: a line of the table, and what is wrong with it."""

    cells: tuple[str, ...]
    problems: tuple[str, ...]


COLUMNS = (
    "pair", "draft", "acceptance length served", "replayed, the same rounds", "rounds equal",
    "prompts equal, explained", "texts as plain", "parts unexplained", "change (gate --measured)",
    "tokens/s at 1", "at 8", "speed-up at 8", "TPOT at 8, ms",
)  # fmt: skip


def rows(validation: Validation, speed: dict[str, Any]) -> Iterator[Row]:
    """A row for each draft."""
    path, judged = validation.measurement, (0, 1, 3)
    for variant in (BF16, *RECIPES):
        held = _asked(
            *("reconcile", str(validation.traces), str(path(variant)), "--json"),
            *("--draft", str(validation.draft(variant))),
            expected=judged,
        )
        audit = _asked(
            *("parity", "divergence", str(path(PLAIN)), str(path(variant)), "--json"),
            *("--plain-again", str(path(PLAIN, 1))),
            expected=judged,
        )
        gate = None
        if variant != BF16:
            gate = _asked(
                *("gate", "--measured", str(path(BF16)), str(path(variant)), "--json"),
                *("--baseline-again", str(path(BF16, 1))),
                expected=judged,
            )
        yield _row(validation.pair.family, variant, held, audit, gate, speed)


def _row(
    family: str,
    variant: str,
    held: dict[str, Any],
    audit: dict[str, Any],
    gate: dict[str, Any] | None,
    speed: dict[str, Any],
) -> Row:
    prompts = held["prompts"]
    outcomes = Counter(prompt["outcome"] for prompt in prompts)
    compared = sum(prompt["num_compared"] for prompt in prompts)
    equal = sum(prompt["num_equal"] for prompt in prompts)
    divergence = next(one for one in audit["findings"] if one["check"] == "divergence")
    served = gate and gate["served"]
    alone, together = (_speed(speed, variant, one) for one in CONCURRENCIES)
    cells = (
        family,
        variant,
        f"{_length(prompts, 'served'):.3f}",
        f"{_length(prompts, 'replayed_there'):.3f} ({_length(prompts, 'served_there'):.3f})",
        f"{equal} of {compared}",
        f"{outcomes['equal']} + {outcomes['explained']} of {len(prompts)}",
        f"{divergence['details'][0]['identity_rate']:.0%}",
        f"{divergence['estimate']:g}",
        "" if served is None else f"{_change(served)} {served['verdict']}",
        f"{alone['tokens_per_second']['value']:,.0f}",
        f"{together['tokens_per_second']['value']:,.0f}",
        _interval(together["speed_up"]),
        f"{1000 * together['time_per_output_token']['value']:.1f}",
    )
    unexplained = outcomes["unexplained"] + outcomes["not known"]
    problems = [f"{family} {variant}: {unexplained} prompts are not explained"] * bool(unexplained)
    problems += [
        f"{family} {variant}: {one['reason']}"
        for one in audit["findings"]
        if one["verdict"] == "FAIL"
    ]
    return Row(cells, tuple(problems))


def _length(prompts: list[dict[str, Any]], what: str) -> float:
    histograms = [prompt[what]["histogram"] for prompt in prompts]
    steps = [sum(column) for column in zip(*histograms, strict=True)]
    return 1 + sum(i * count for i, count in enumerate(steps)) / sum(steps)


def _speed(speed: dict[str, Any], variant: str, concurrency: int) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for one in speed["figures"]
        if (one["variant"], one["concurrency"]) == (variant, concurrency)
    )  # fmt: skip
    return found


def _change(report: dict[str, Any]) -> str:
    change = report["change"]
    if change is None:
        return ""
    ends = ", ".join(f"{math.expm1(change[end]):+.2%}" for end in ("lower", "upper"))
    return f"{report['relative_change']:+.2%} ({ends})"


def _interval(estimate: dict[str, Any]) -> str:
    if estimate["lower"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['lower']:.2f}, {estimate['upper']:.2f})"


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in found)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _asked(*arguments: str, expected: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The JSON of one `draftquant` command.

    Raises:
        RuntimeError: it ended otherwise; the message has what it said.
    """
    command = (sys.executable, "-m", "draftquant.scripts.cli", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode not in expected:
        raise RuntimeError(
            f"draftquant {arguments[0]} ended with {done.returncode}:\n{done.stderr}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep everything in")
    parser.add_argument("--only", nargs="*", help="families")
    options = parser.parse_args()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for pair in SERVED_PAIRS:
            if not options.only or pair.family in options.only:
                work = (options.work or Path(temporary)) / pair.family
                validation = Validation(pair, work, options.python)
                found += rows(validation, validation.make())
    print(table(found))
    if not options.only:
        RESULTS.write_text(HEAD + table(found))
    problems = [problem for row in found for problem in row.problems]
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
