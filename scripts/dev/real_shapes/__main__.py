"""The command that writes a draft of real size with random weights.

python -m draftquant.scripts.dev.real_shapes OUT [--draft NAME] [--seed 0] [--scale 1.0]
                                         [--divide 8]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ....recipes.errors import DraftQuantError
from .drafts import DEFAULT_DRAFT, REAL_DRAFTS
from .generate import write_real_shape_draft


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="draftquant.scripts.dev.real_shapes",
        description="Write a draft of real size with random weights.",
    )
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--draft", default=DEFAULT_DRAFT, choices=REAL_DRAFTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the linears' spread, 0.02")
    parser.add_argument("--divide", type=int, default=1, help="so many times smaller widths")
    chosen = parser.parse_args(arguments)
    divisors = REAL_DRAFTS[chosen.draft].divisors
    if chosen.divide not in divisors:
        parser.error(f"--divide: expected one of {divisors} for {chosen.draft}")
    try:
        write_real_shape_draft(
            chosen.out,
            draft=chosen.draft,
            seed=chosen.seed,
            scale=chosen.scale,
            divide=chosen.divide,
        )
    except DraftQuantError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
