"""What each format and algorithm costs in accepted tokens, on trained pairs and fresh prompts.

    python -m draftquant.scripts.bench_quality WORKDIR [--pair tests/pairs/eagle3-llama ...]
        [--recipe int4-channel ...] [--algorithm gptq quark:gptq ...] [--prompts 240] [--json]

An algorithm is computed by backend torch, or by the one that stands before it.
Of each pair the gate prompts are the shipped ones and so many more, from files that neither
training nor calibration saw. Every draft is quantized by a process of its own, whose CPU time and
memory are taken, and judged by the gate's rules, also on text drawn at temperature 1, where what is
compared is the expected number of accepted tokens. Traces and drafts stay in WORKDIR and are used
again.

Needs a checkout: the corpus behind the pairs is not installed.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..recipes.errors import DraftQuantError
from .checkout import check_checkout
from .console import print_error, print_json, print_table, stderr, table

PAIRS = ("eagle3-llama", "eagle3-mla", "dflash")
RECIPES = ("int4-channel", "int4-group128", "hopper-w4a8", "blackwell-nvfp4", "mi355-mxfp4")
ALGORITHMS = ("absmax", "mse", "gptq", "learned")
NEW_TOKENS = 128
SEED = 1
"""The shipped prompts were drawn with 0."""
STDERR_LINES = 5
_MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as file:
    print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A process between, which is small: a child's peak counts what its parent held when it began."""


class BenchError(DraftQuantError):
    """What is to be measured cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of the acceptance length against BF16, as fractions; bounds one-sided at 95 %."""

    relative: float
    lower: float
    upper: float
    verdict: str

    def __str__(self) -> str:
        bounds = f"({self.lower:+.2%}, {self.upper:+.2%})"
        return f"{self.relative:+.2%} {bounds} {self.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantized draft.

    Attributes:
        algorithm: its backend before it, but for torch.
        weight_error: root of the relative squared error, mean over the linears.
        agreement: share of first proposals equal to those of BF16.
        greedy, drawn: on greedy text, and on text of temperature 1.
        cpu_seconds, peak_bytes: of `draftquant quantize`, a process of its own.
    """

    pair: str
    recipe: str
    algorithm: str
    weight_error: float
    agreement: float
    acceptance_length: float
    greedy: Change
    drawn: Change
    cpu_seconds: float
    peak_bytes: int


class Bench:
    """One pair: its prompts, its traces, and the drafts that are made of it."""

    def __init__(self, pair: Path, work: Path, num_prompts: int) -> None:
        self.pair, self.work = pair, work / pair.name
        self.draft = pair / "draft"
        if not (pair / "training.json").is_file():
            raise BenchError(str(pair), "is no trained pair", fix="give one of tests/pairs")
        self.work.mkdir(parents=True, exist_ok=True)
        self._prompts = self.work / f"prompts-{num_prompts}.jsonl"
        if not self._prompts.exists():
            _write_prompts(pair, self._prompts, num_prompts)

    def rows(self, recipes: Sequence[str], algorithms: Sequence[str]) -> Iterator[Row]:
        """Every recipe by every algorithm.

        Raises:
            BenchError: a command failed.
        """
        calibration = self._traces("calibration", self.pair / "calibration.jsonl")
        gate = self._traces("gate", self._prompts)
        drawn = self._traces("drawn", self._prompts, "--temperature", "1", "--seed", "1")
        for recipe in recipes:
            for algorithm in algorithms:
                yield self._row(recipe, algorithm, calibration, gate, drawn)

    def _traces(self, name: str, prompts: Path, *options: str) -> Path:
        out = self.work / name
        if not out.exists():
            _draftquant(
                "record",
                *("--target", str(self.pair / "target"), "--draft", str(self.draft), "--tables"),
                *("--prompts", str(prompts), "--max-new-tokens", str(NEW_TOKENS)),
                *("--out", str(out), *options),
            )
        return out

    def _row(self, recipe: str, algorithm: str, traces: Path, gate: Path, drawn: Path) -> Row:
        name = f"{recipe}-{algorithm.replace(':', '-')}"
        out, took = self.work / name, self.work / f"{name}.json"
        if not out.exists():
            taken = _draftquant(
                "quantize",
                *(str(self.draft), "--recipe", recipe, "--json"),
                *_chosen(algorithm),
                *_needed(recipe, algorithm, traces),
                *("--out", str(out)),
            )
            took.write_text(json.dumps(asdict(taken)))
        taken = Taken(**json.loads(took.read_text()))
        judged = [self._judged(out, traces) for traces in (gate, drawn)]
        (greedy, agreement, length), (sampled, _, _) = judged
        return Row(
            pair=self.pair.name,
            recipe=recipe,
            algorithm=algorithm,
            weight_error=taken.weight_error,
            agreement=agreement,
            acceptance_length=length,
            greedy=greedy,
            drawn=sampled,
            cpu_seconds=taken.cpu_seconds,
            peak_bytes=taken.peak_bytes,
        )

    def _judged(self, out: Path, traces: Path) -> tuple[Change, float, float]:
        """The change, the agreement of first proposals and the acceptance length."""
        from ..calibration.traces.folder import TraceFolder
        from ..quantize.stored.loading import load_draft
        from ..validate.gate import judge
        from ..validate.policy import POLICIES
        from ..validate.replay import chosen_num_draft_tokens, replay_drafts

        opened = TraceFolder.open(traces)
        drafts = [load_draft(f, shared=opened.tables(None)) for f in (self.draft, out)]
        count = chosen_num_draft_tokens(None, drafts)
        baseline, candidate = replay_drafts(drafts, opened, num_draft_tokens=count)
        report = judge(baseline, candidate, POLICIES["release"])
        if report.change is None:
            raise BenchError(str(out), report.reason, fix="record more prompts")
        found = report.change
        change = Change(
            relative=found.relative_change,
            lower=math.expm1(found.lower),
            upper=math.expm1(found.upper),
            verdict=report.verdict,
        )
        first = report.first_step
        agreement = first.num_equal / first.num_rows
        return change, agreement, report.candidate.mean_acceptance_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a process took, and the mean error of the weights where it quantized.

    Seconds of all cores together: they are the same on a busy machine.
    """

    cpu_seconds: float
    peak_bytes: int
    weight_error: float = 0.0


def _chosen(algorithm: str) -> tuple[str, ...]:
    backend, _, name = algorithm.rpartition(":")
    return ("--algorithm", name, "--backend", backend or "torch")


def _needed(recipe: str, algorithm: str, traces: Path) -> tuple[str, ...]:
    from ..recipes import load_recipe

    name = algorithm.rpartition(":")[2]
    needs = load_recipe(recipe).needs_input_scales or name not in ("absmax", "mse")
    return ("--traces", str(traces)) if needs else ()


def _draftquant(*arguments: str) -> Taken:
    """One command in a process of its own."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as errors:
        with tempfile.NamedTemporaryFile() as usage:
            command = (sys.executable, "-m", "draftquant.scripts.cli", *arguments)
            measured = (sys.executable, "-c", _MEASURED, usage.name, *command)
            status = subprocess.run(measured, stdout=stdout, stderr=errors, check=False).returncode
            taken = usage.read().split()
        stdout.seek(0)
        errors.seek(0)
        printed, said = stdout.read().decode(), errors.read().decode(errors="replace")
    if status:
        details = said.strip().splitlines()[-STDERR_LINES:]
        raise BenchError(arguments[0], "failed", details=details, fix="use another WORKDIR")
    errors_of = []
    if arguments[0] == "quantize":
        linears = json.loads(printed)["verification"]["linears"]
        errors_of = [one["relative_l2_error"] for one in linears]
    return Taken(
        cpu_seconds=float(taken[0]),
        peak_bytes=int(taken[1]),
        weight_error=sum(errors_of) / len(errors_of) if errors_of else 0.0,
    )


def _write_prompts(pair: Path, out: Path, num_more: int) -> None:
    """The shipped gate prompts and more of the same kind, chosen by the target alone."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from .training.corpus import held_out_prompts, standard_library
    from .training.pair import PairPlan
    from .training.selection import select_prompts

    shipped = [json.loads(line) for line in (pair / "prompts.jsonl").read_text().splitlines()]
    known, plan = {tuple(one["token_ids"]) for one in shipped}, PairPlan()
    more = []
    if num_more:
        candidates = held_out_prompts(
            standard_library(),
            "gate",
            PreTrainedTokenizerFast.from_pretrained(pair / "target"),
            count=4 * num_more + len(shipped),
            length=plan.prompt_length,
            seed=SEED,
        )
        fresh = [one for one in candidates if one.token_ids not in known]
        target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
        chosen = select_prompts(
            target,
            fresh,
            count=num_more,
            num_new_tokens=plan.num_new_tokens,
            max_repeated_8gram_share=plan.max_repeated_8gram_share,
        )
        more = [asdict(one) | {"id": f"more-{one.id}"} for one in chosen.prompts]
    out.write_text("".join(json.dumps(one) + "\n" for one in [*shipped, *more]))


def print_rows(rows: Sequence[Row]) -> None:
    """One table."""
    columns = (
        "weight error",
        "first token",
        "length",
        "change, greedy",
        "change, drawn",
        "CPU s",
        "MB",
    )
    found = table("Quality", "pair", "recipe", "algorithm", *columns, right=columns)
    for row in rows:
        found.row(
            row.pair,
            row.recipe,
            row.algorithm,
            f"{row.weight_error:.4f}",
            f"{row.agreement:.2%}",
            f"{row.acceptance_length:.4f}",
            str(row.greedy),
            str(row.drawn),
            f"{row.cpu_seconds:.1f}",
            f"{row.peak_bytes / 1e6:,.0f}",
        )
    print_table(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when everything was measured, 2 when something could not be made, or this is no checkout.
    """
    parser = argparse.ArgumentParser(prog="bench_quality", description=__doc__)
    parser.add_argument("workdir", type=Path)
    root = Path(__file__).resolve().parent.parent / "tests" / "pairs"
    shipped = [root / name for name in PAIRS]
    parser.add_argument("--pair", type=Path, nargs="*", default=shipped, help="trained pairs")
    parser.add_argument("--recipe", nargs="*", default=RECIPES)
    parser.add_argument("--algorithm", nargs="*", default=ALGORITHMS)
    parser.add_argument("--prompts", type=int, default=240, help="beside the shipped 96")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    rows = []
    try:
        check_checkout("bench_quality")
        chosen = parser.parse_args(arguments)
        for pair in chosen.pair:
            bench = Bench(pair, chosen.workdir, chosen.prompts)
            for row in bench.rows(chosen.recipe, chosen.algorithm):
                rows.append(row)
                progress = f"{row.pair} {row.recipe} {row.algorithm}: {row.greedy}"
                stderr().line(f"{progress}, drawn {row.drawn}")
    except DraftQuantError as exc:
        print_error(exc)
        return 2
    if chosen.json:
        print_json([asdict(row) for row in rows])
    else:
        print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
