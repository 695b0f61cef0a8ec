"""Train a shipped pair anew, on CPU in minutes, and write target and draft as published folders.

    python -m draftquant.scripts.dev.training --family eagle3-llama --out DIR

Configs, names and plan are those of the pair in tests/pairs. The folder holds target/, draft/,
prompts.jsonl (held out, for the gate), calibration.jsonl (held out, from other files) and
training.json (every figure printed here).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import PAIRS
from .corpus import standard_library
from .pair import train_pair
from .pattern import pattern_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when the pair was written, 2 when the output exists already.
    """
    parser = argparse.ArgumentParser(
        prog="draftquant.scripts.dev.training", description="Train a target and its draft."
    )
    families = sorted(path.name for path in PAIRS.iterdir() if path.is_dir())
    parser.add_argument("--family", choices=families, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        print(
            f"{chosen.out}: output exists already\n  fix: remove it or name another folder",
            file=sys.stderr,
        )
        return 2
    pattern = pattern_of(PAIRS / chosen.family)
    report = train_pair(pattern, standard_library(), chosen.out, seed=chosen.seed)
    print(json.dumps({name: report[name] for name in ("figures", "sizes", "seconds")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
