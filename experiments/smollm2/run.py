"""SmolLM2-135M-Instruct, drafts trained on its answers, and what quantizing them costs.

Usage: `experiments/run smollm2 --work DIR [--drafts NAME ...] [--only STAGE ...]`. Every stage
keeps what it made in DIR, goes on there after a kill, and is left out once `DIR/STAGE.seconds` says
how long it took.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import answers  # noqa: E402
import drafts  # noqa: E402
import judged  # noqa: E402
import judging  # noqa: E402
import prompts  # noqa: E402
import served_judged  # noqa: E402
import served_pair  # noqa: E402
from draftquant.scripts.dev import PAIRS  # noqa: E402
from draftquant.scripts.dev.packaged_target import kept_target  # noqa: E402
from draftquant.scripts.dev.training.optimisation import Schedule  # noqa: E402
from stages import Stages, Work, run_asked  # noqa: E402

SCHEDULES = {
    "eagle3": Schedule(num_steps=6000, batch_size=8, max_learning_rate=4e-3, muon=True),
    "dflash": Schedule(num_steps=1200, batch_size=24, max_learning_rate=4e-3, muon=True),
}


def _target(work: Work) -> None:
    kept_target(PAIRS / "smollm2/requirements.txt", work.target)


def _prompts(work: Work) -> None:
    (work / "prompts/shipped").mkdir(parents=True, exist_ok=True)
    prompts.write_prompts(work.tokenizer(), work / "prompts")
    prompts.write_prompts(work.tokenizer(), work / "prompts/shipped", ships=True)


def _answers(work: Work) -> None:
    (work / "states").mkdir(exist_ok=True)
    training = work / "prompts/training.jsonl"
    answers.write_shards(work.target, work.tokenizer(), training, work / "states", work.texts)


def _train(work: Work) -> None:
    for name in work.drafts:
        if not (work / name / "training.json").exists():
            drafts.train(name, work.target, work / "states", work / name, SCHEDULES[name], 0)


def _record(work: Work) -> None:
    (work / "traces").mkdir(exist_ok=True)
    layers = ",".join(map(str, answers.AUX_LAYERS))
    judging.record(
        judged.RECORDINGS, work.target, work / "prompts", work / "traces",
        "--aux-layers", layers, "--turns", "all", "--max-new-tokens", judged.NEW_TOKENS,
    )  # fmt: skip


def _cut(work: Work) -> None:
    (work / "eagle3-cut").mkdir(exist_ok=True)
    counts = answers.counts(work / "states", drafts.SIZE.vocab_size)
    (work / "counts.json").write_text(json.dumps(counts), encoding="utf-8")
    judging.run(
        "vocab", work / "eagle3/draft", "--size", drafts.DRAFT_VOCABULARY,
        "--traces", work / "traces/shipped-calibration", "--counts", work / "counts.json",
        "--target", work.target, "--out", work / "eagle3-cut/draft",
    )  # fmt: skip


def _gate(work: Work) -> None:
    if not (work / "shipped").exists():
        (work / "shipped").mkdir()
        (work / "shipped/draft").symlink_to(PAIRS / "smollm2/draft")
    judging.judge(judged.CASES, work.folder, work.target, work / "traces", judged.DEPTHS)
    rows = judging.rows(judged.CASES, work.folder)
    judging.write_rows(work / "results.json", rows)
    if len(rows) < len(judged.CASES):
        raise SystemExit("some cases wait for a draft or for traces: run `train` and `record`")


STAGES: Stages = {
    "target": (_target, "half a minute, 93 MB"),
    "prompts": (_prompts, "a minute and a half"),
    "answers": (_answers, "a minute for 128 texts"),
    "train": (_train, "an hour and a half a draft"),
    "record": (_record, "an hour"),
    "cut": (_cut, "5 minutes"),
    "gate": (_gate, "an hour and a half"),
    "served-drafts": (served_pair.make, "10 minutes"),
    "serve": (served_pair.measure, "an hour"),
    "served": (served_judged.judge, "10 minutes"),
}


if __name__ == "__main__":
    sys.exit(run_asked(STAGES, SCHEDULES, ("--texts", 6400, "first answers of the training")))
