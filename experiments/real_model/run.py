"""Gemma 3 270M, a draft trained on it, and what quantizing the draft costs; see README.md.

Usage: `experiments/run real_model --work DIR [--drafts NAME ...] [--only STAGE ...]`. Every stage
keeps what it made in DIR, goes on there after a kill, and is left out once `DIR/STAGE.seconds` says
how long it took.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import drafts  # noqa: E402
import judged  # noqa: E402
import judging  # noqa: E402
import loop  # noqa: E402
import model  # noqa: E402
import states  # noqa: E402
import text  # noqa: E402
from draftquant.scripts.dev.packaged_target import convert, install  # noqa: E402
from stages import Stages, Work, run_asked  # noqa: E402

NUM_STEPS = {"eagle3": 3000, "mla": 2000, "dflash": 1500}
"""Of the training of each draft."""
LONG = {2048: 30, 8192: 8}
"""Tokens of long prompts, and how many of them."""


def _convert(work: Work) -> None:
    model.assemble(work / "packages", work / "model.gguf")
    work.target.mkdir(parents=True, exist_ok=True)
    convert(work / "packages", work / "model.gguf", work.target)


def _prompts(work: Work) -> None:
    (work / "prompts").mkdir(exist_ok=True)
    text.write_prompts(work.tokenizer(), work / "prompts")


def _long_prompts(work: Work) -> None:
    for num_tokens, count in LONG.items():
        text.write_long_prompts(work.tokenizer(), work / "prompts", num_tokens, count)


def _states(work: Work) -> None:
    (work / "states").mkdir(exist_ok=True)
    prompts = work / "prompts/training.jsonl"
    states.write_shards(work.target, work.tokenizer(), prompts, work / "states", work.texts)


def _train(work: Work) -> None:
    for name in work.drafts:
        if not (work / name / "training.json").exists():
            drafts.train(name, work.target, work / "states", work / name, NUM_STEPS[name], seed=0)


def _record(work: Work) -> None:
    (work / "traces").mkdir(exist_ok=True)
    layers = ",".join(map(str, states.AUX_LAYERS))
    judging.record(
        judged.RECORDINGS, work.target, work / "prompts", work / "traces",
        "--aux-layers", layers, "--ignore-eos", "--max-new-tokens", states.NEW_TOKENS,
    )  # fmt: skip


def _loop(work: Work) -> None:
    depth = drafts.DRAFTS["eagle3"].num_draft_tokens
    rows = loop.compare(work.target, work / "eagle3/draft", work / "traces/gate", depth, 20)
    judging.write_rows(work / "loop.json", rows)


def _gate(work: Work) -> None:
    judging.judge(judged.CASES, work.folder, work.target, work / "traces", judged.DEPTHS)
    rows = judging.rows(judged.CASES, work.folder)
    judging.write_rows(work / "results.json", rows)
    if len(rows) < len(judged.CASES):
        raise SystemExit("some cases wait for a draft or for traces: run `train` and `record`")


def _curve(work: Work) -> None:
    counts = states.counts(work / "states", drafts.SIZE.vocab_size)
    (work / "counts.json").write_text(json.dumps(counts), encoding="utf-8")
    rows = judged.curve(work.folder, "eagle3-whole", work.target, work / "traces")
    judging.write_rows(work / "curve.json", rows)


STAGES: Stages = {
    "install": (lambda work: install(model.REQUIREMENTS, work / "packages"), "a minute, 240 MB"),
    "convert": (_convert, "3 minutes"),
    "prompts": (_prompts, "4 minutes"),
    "long-prompts": (_long_prompts, "3 minutes"),
    "states": (_states, "2 minutes a shard of 32,768 tokens"),
    "record": (_record, "an hour"),
    "train": (_train, "an hour a draft"),
    "loop": (_loop, "10 minutes"),
    "gate": (_gate, "an hour and a half"),
    "curve": (_curve, "20 minutes"),
}


if __name__ == "__main__":
    sys.exit(run_asked(STAGES, NUM_STEPS, ("--shards", 12, "of training text")))
