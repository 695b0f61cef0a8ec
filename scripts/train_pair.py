"""Train a small target and its draft, on CPU in minutes, and write both as published folders.

    python -m draftquant.scripts.train_pair --family eagle3-llama --out DIR

The folder holds target/, draft/, prompts.jsonl (held out, for the gate), calibration.jsonl
(held out, from other files) and training.json (every figure printed here).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .training.corpus import standard_library
from .training.eagle3 import Eagle3Draft, Eagle3Size
from .training.pair import Family, PairPlan, train_pair

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="eagle3-llama",
            build=lambda target, target_size: Eagle3Draft(target, target_size, Eagle3Size()),
            aux_layer_ids=Eagle3Size().aux_layer_ids,
        ),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when the pair was written, 2 when the output exists already.
    """
    parser = argparse.ArgumentParser(prog="train_pair", description="Train a target and its draft.")
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        print(
            f"{chosen.out}: output exists already\n  fix: remove it or name another folder",
            file=sys.stderr,
        )
        return 2
    report = train_pair(
        FAMILIES[chosen.family], PairPlan(), standard_library(), chosen.out, seed=chosen.seed
    )
    print(json.dumps({name: report[name] for name in ("figures", "sizes", "seconds")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
