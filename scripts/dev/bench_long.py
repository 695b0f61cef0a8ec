"""Memory and time of record, replay and gate on one long prompt, by its length.

    python -m draftquant.scripts.dev.bench_long WORKDIR [--pair tests/pairs/eagle3-llama]
        [--tokens 4096 16384 65536] [--new-tokens 1024] [--gate] [--json]

Target and draft of the pair are copied with their rope stretched by YaRN to the longest text: they
were trained on short ones, so that acceptance is low but real. The prompt is the shipped prompts
one after the other, again and again, up to the length less the answer. Each command runs in a
process of its own, whose peak of resident memory counts. Copies and traces stay in WORKDIR.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.files.staging import write_text
from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_object
from ..console import print_table, stderr, table
from . import PAIRS
from .command_lines import benchmark_parser, run_benchmark
from .measured_process import BenchError, run_measured

RECIPE = "int4-channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one command took.

    Attributes:
        tokens: of prompt and answer.
        wall_seconds, cpu_seconds: of its process, start-up included.
        peak_bytes: resident memory of its process.
        trace_bytes: of the traces' files.
        result: the acceptance length or the verdict, where there is one.
    """

    name: str
    tokens: int
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    trace_bytes: int
    result: str = ""


def stretched_pair(pair: Path, out: Path, positions: int) -> tuple[Path, Path]:
    """Copies of a target and its draft with as many positions, by YaRN of both.

    Args:
        pair: with the folders `target` and `draft`, of plain rope and equal positions.
        out: folder to create, if it is not there.
        positions: that both can read.

    Returns:
        The target and the draft.
    """
    copies = out / "target", out / "draft"
    if out.exists():
        return copies
    for copy in copies:
        shutil.copytree(pair / copy.name, copy)
        path = copy / "config.json"
        config: dict[str, Any] = dict(parse_object(read_text(path)))
        trained = config["max_position_embeddings"]
        parameters = dict(config.get("rope_parameters") or {})
        yarn = {
            "rope_type": "yarn",
            "factor": positions / trained,
            "original_max_position_embeddings": trained,
        }
        key = "rope_parameters" if parameters else "rope_scaling"
        config |= {key: parameters | yarn, "max_position_embeddings": positions}
        path.unlink()
        write_text(path, json.dumps(config, indent=2) + "\n")
    return copies


def long_prompt(pair: Path, length: int) -> list[int]:
    """The pair's prompts one after the other, again and again."""
    lines = read_text(pair / "prompts.jsonl").splitlines()
    tokens = itertools.chain.from_iterable(
        parse_object(line)["token_ids"] for line in itertools.cycle(lines)
    )
    return list(itertools.islice(tokens, length))


def run_stages(asked: argparse.Namespace, tokens: int) -> list[Stage]:
    """Record one prompt, replay the draft, and gate its INT4 version.

    Raises:
        BenchError: a command failed.
    """
    folder: Path = asked.workdir
    target, draft = stretched_pair(asked.pair, folder / "pair", max(asked.tokens))
    prompts, traces = folder / f"prompts-{tokens}.jsonl", folder / f"traces-{tokens}"
    length = tokens - asked.new_tokens
    if not prompts.exists():
        line = {"id": f"{tokens}", "category": "long", "token_ids": long_prompt(asked.pair, length)}
        write_text(prompts, json.dumps(line) + "\n")
    if traces.exists():
        raise BenchError(str(traces), "is there already", fix="move it, or use another WORKDIR")
    recorded = ("--target", str(target), "--draft", str(draft), "--prompts", str(prompts))
    new = ("--max-new-tokens", str(asked.new_tokens), "--ignore-eos")
    stages = [_stage("record", tokens, traces, "record", *recorded, *new, "--out", str(traces))]
    judged = ("--traces", str(traces), "--no-cache")
    stages.append(_stage("replay", tokens, traces, "replay", str(draft), *judged))
    if asked.gate:
        quantized = folder / RECIPE
        if not quantized.exists():
            _run("quantize", str(draft), "--recipe", RECIPE, "--out", str(quantized))
        both = (str(draft), str(quantized))
        stages.append(_stage("gate", tokens, traces, "gate", *both, *judged))
    return stages


def _run(*arguments: str) -> Any:
    """One command; a verdict against a draft is no failure."""
    taken = run_measured(sys.executable, "-m", "draftquant.scripts.cli", *arguments, "--json")
    if taken.status not in {0, 1, 3}:
        raise BenchError(arguments[0], f"exit code {taken.status}", details=taken.last_lines,
                         fix="see what the command says")  # fmt: skip
    return taken


def _stage(name: str, tokens: int, traces: Path, *arguments: str) -> Stage:
    stderr().line(f"{name}, {tokens:,} tokens")
    taken = _run(*arguments)
    said = json.loads(taken.stdout)
    found = said[0] if isinstance(said, list) else said
    result = ""
    if "verdict" in found:
        change = found["relative_change"]
        result = f"{found['verdict']}{'' if change is None else f' {change:+.2%}'}"
    elif "mean_acceptance_length" in found:
        result = f"{found['mean_acceptance_length']:.4f}"
    return Stage(
        name=name,
        tokens=tokens,
        wall_seconds=taken.wall_seconds,
        cpu_seconds=taken.cpu_seconds,
        peak_bytes=taken.peak_bytes,
        trace_bytes=sum(path.stat().st_size for path in traces.iterdir()),
        result=result,
    )


def print_stages(_asked: argparse.Namespace, stages: Sequence[Stage]) -> None:
    """One row for each command."""
    columns = ("tokens", "wall s", "CPU s", "peak MB", "traces MB")
    found = table("long contexts", "command", *columns, "result", right=columns)
    for stage in stages:
        seconds = (f"{stage.wall_seconds:.1f}", f"{stage.cpu_seconds:.1f}")
        sizes = (f"{stage.peak_bytes / 1e6:,.0f}", f"{stage.trace_bytes / 1e6:,.0f}")
        found.row(stage.name, f"{stage.tokens:,}", *seconds, *sizes, stage.result)
    print_table(found)


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("bench_long", "Memory and time of one long prompt.")
    parser.add_argument("--pair", type=Path, default=PAIRS / "eagle3-llama")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--new-tokens", type=int, default=1024, help="of these, the answer")
    parser.add_argument("--gate", action="store_true", help="also gate an INT4 draft")
    return parser


def _measure(asked: argparse.Namespace) -> list[Stage]:
    asked.workdir.mkdir(parents=True, exist_ok=True)
    return [stage for tokens in asked.tokens for stage in run_stages(asked, tokens)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when everything was measured, 2 when something failed.
    """
    return run_benchmark(_parser(), arguments, _measure, print_stages)


if __name__ == "__main__":
    sys.exit(main())
