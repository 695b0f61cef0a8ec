"""Train a small target and its draft, on CPU in minutes, and write both as published folders.

    python -m draftquant.scripts.dev.training --family eagle3-llama --out DIR

The folder holds target/, draft/, prompts.jsonl (held out, for the gate), calibration.jsonl
(held out, from other files) and training.json (every figure printed here).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .corpus import standard_library
from .draft_kinds import (
    DFLASH,
    DFLASH2,
    DSPARK,
    DSPARK_MLA,
    DSPARK_NEMOTRON,
    EAGLE3_LLAMA,
    EAGLE3_MLA,
    GLM4_MOE_MTP,
    MIMO_MTP,
    PEAGLE,
)
from .optimisation import Schedule
from .pair import Family, PairPlan, train_pair
from .target import TargetSize
from .target_kinds import DEEPSEEK_V3, LLAMA, QWEN3

_BLOCKS = PairPlan(
    num_training_prompts=3072,
    num_candidates_per_prompt=8,
    draft_schedule=Schedule(num_steps=800, batch_size=32, max_learning_rate=3e-3),
    num_draft_tokens=7,
    row_stride=16,
    depth_decay=0.7,
)
_FEWER = replace(
    _BLOCKS,
    num_training_prompts=1024,
    draft_schedule=Schedule(num_steps=450, batch_size=20, max_learning_rate=4e-3),
    num_threads=1,
)
FAMILIES = {
    family.name: family
    for family in (
        Family(target_kind=LLAMA, draft_kind=EAGLE3_LLAMA),
        Family(target_kind=LLAMA, draft_kind=PEAGLE, variant="peagle"),
        Family(target_kind=LLAMA, draft_kind=MIMO_MTP),
        Family(target_kind=LLAMA, draft_kind=GLM4_MOE_MTP),
        Family(
            target_kind=DEEPSEEK_V3,
            draft_kind=EAGLE3_MLA,
            plan=PairPlan(
                target=TargetSize(num_hidden_layers=5, intermediate_size=512),
                num_candidates_per_prompt=6,
            ),
        ),
        Family(
            target_kind=QWEN3,
            draft_kind=DSPARK_MLA,
            plan=_FEWER,
        ),
        Family(
            target_kind=QWEN3,
            draft_kind=DSPARK_NEMOTRON,
            plan=replace(  # not shipped: enough to accept what a gate can judge
                _FEWER,
                num_training_prompts=256,
                draft_schedule=Schedule(num_steps=180, batch_size=16, max_learning_rate=4e-3),
                num_gate_prompts=24,
                num_calibration_prompts=16,
                num_candidates_per_prompt=8,
            ),
            variant="dspark-nemotron",
        ),
        Family(target_kind=QWEN3, draft_kind=DFLASH, plan=_BLOCKS),
        Family(target_kind=QWEN3, draft_kind=DFLASH2, plan=_BLOCKS),
        Family(
            target_kind=QWEN3,
            draft_kind=DSPARK,
            plan=PairPlan(
                num_candidates_per_prompt=8,
                draft_schedule=Schedule(num_steps=700, batch_size=32, max_learning_rate=4e-3),
                num_draft_tokens=6,
                row_stride=16,
                depth_decay=0.7,
            ),
        ),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="draftquant.scripts.dev.training", description="Train a target and its draft."
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, help="train on this one of these, not a new one")
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        print(
            f"{chosen.out}: output exists already\n  fix: remove it or name another folder",
            file=sys.stderr,
        )
        return 2
    family = FAMILIES[chosen.family]
    report = train_pair(
        family,
        family.plan,
        standard_library(),
        chosen.out,
        seed=chosen.seed,
        shipped_target=chosen.target,
    )
    print(json.dumps({name: report[name] for name in ("figures", "sizes", "seconds")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
