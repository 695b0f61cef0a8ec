"""Make folders with other tools, ask both engines, and hold `draftquant check` against them.

`foreign/` makes the folders; what is asked is asked by `folder_rows`, of their headers. `--write`
keeps one folder of each scheme of each tool in foreign_sample.json.

Exit status 1: `check` is wrong or says UNKNOWN somewhere.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAKERS = HERE / "foreign"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(MAKERS)]  # tiny.py and its kin

from drafts import write_drafts  # noqa: E402
from folder_rows import (  # noqa: E402
    SAMPLE_FILE,
    Row,
    asked_again,
    differences,
    read_rows,
    row_of,
    write_rows,
)

IN_TOOLS, IN_OURS = ("llmcompressor",), ("modelopt", "quark")
"""Makers, by the environment that their tool is in."""
PLATFORMS = {
    "vllm sm80": 3, "vllm sm90": 1, "vllm sm100": 2, "vllm gfx942": 2,
    "sglang sm90": 1, "sglang sm100": 3, "sglang gfx942": 1, "sglang gfx950": 2,
}  # fmt: skip
"""Engine and GPU -> every how many folders are asked for."""
SHARDS = {1: 1, 2: 4, 4: 6, 8: 8}
"""Number of shards -> every how many of those are asked for in so many."""


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, help="folder to keep folders and raw output in")
    parser.add_argument("--turn", type=int, default=0, help="which drafts each scheme is put on")
    parser.add_argument("--makers", nargs="*", default=[*IN_TOOLS, *IN_OURS])
    parser.add_argument("--only", default="", help="part of the name of a folder that is asked for")
    parser.add_argument("--write", action="store_true", help="keep a folder of each scheme")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "drafts").exists():
            _make(work, given.makers, given.turn)
        folders = sorted(path.parent for path in work.glob("drafts/*/*--*/config.json"))
        folders = [folder for folder in folders if given.only in str(folder)]
        rows = [row_of(folder, answers={"": _questions(i)}) for i, folder in enumerate(folders)]
        again = asked_again(rows, Path(temporary) / "asked")
        found = list(differences(again, again, Path(temporary)))
    if given.write:
        _write_sample(again)
    print(*found, sep="\n")
    return 1 if len(found) > 1 else 0


def _questions(number: int) -> list[str]:
    return [
        f"{platform} {tp}"
        for i, (platform, every) in enumerate(PLATFORMS.items())
        for tp, shards in SHARDS.items()
        if number % every == i % every and number // every % shards == tp % shards
    ]


def _make(work: Path, makers: Sequence[str], turn: int) -> None:
    """Every tool in its own process; what it refuses to quantize is left out."""
    write_drafts(work / "drafts")
    bins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Quark wants ninja
    for maker in makers:
        print(f"making folders with {maker}", file=sys.stderr)
        python = os.environ["TOOLS_PYTHON"] if maker in IN_TOOLS else sys.executable
        made = [str(work / "drafts"), str(work / f"{maker}.jsonl"), str(turn)]
        with (work / f"{maker}.log").open("w") as log:
            subprocess.run(
                [python, "-W", "ignore", str(MAKERS / f"by_{maker}.py"), *made],
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": bins},
                stdout=log,
                stderr=log,
            )


def _write_sample(rows: Sequence[Row]) -> None:
    """One folder of each scheme of each tool, with as many kinds of answers as there are; of as
    many, the smallest. Those of schemes that were not made stay."""

    def scheme(row: Row) -> str:
        return str(row["draft"]).rpartition("/")[2]

    in_order = sorted(rows, key=lambda row: (len(row["answers"]), -len(row["tensors"])))
    best = {scheme(row): row for row in in_order}
    others = [row for row in read_rows() if scheme(row) not in best]
    write_rows(SAMPLE_FILE, [*others, *best.values()])


if __name__ == "__main__":
    sys.exit(main())
