"""Make the cases, ask both engines, write results.json and RESULTS.md, hold `check` against them.

Exit status 1: a prediction of `draftquant check` is not what an engine did.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))  # tiny.py and its kin

import asking  # noqa: E402
from cases import TARGET_FOLDER, Case, write_cases  # noqa: E402
from predictions import find_mismatches  # noqa: E402
from results import COLUMNS, Outcome, with_linears, write_results  # noqa: E402


class Platform(NamedTuple):
    """One process: an engine on a faked GPU, in so many shards."""

    engine: str
    arch: str
    tp: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.arch}-tp{self.tp}"


PLATFORMS = [Platform(*place, tp) for place in COLUMNS for tp in (1, 2)]


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, help="folder to keep cases and raw output in")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the result tables")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        folders = work / "cases"
        work.mkdir(parents=True, exist_ok=True)
        print(f"writing drafts into {folders}", file=sys.stderr)
        cases = write_cases(folders)
        outcomes = _ask_engines(folders, cases)
        write_results(arguments.out, cases, outcomes)
        mismatches = find_mismatches(folders, outcomes)
    print(*mismatches, sep="\n")
    print(f"{len(mismatches)} of {len(outcomes)} predictions of `draftquant check` are wrong")
    return 1 if mismatches else 0


def _ask_engines(folders: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Every platform in its own process, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda on: _ask(folders, _names(cases, on), on), PLATFORMS)
        return [with_linears(outcome) for answer in answers for outcome in answer]


def _names(cases: Sequence[Case], platform: Platform) -> list[str]:
    return [case.name for case in cases if case.refused is None and platform.tp in case.tp]


def _ask(folders: Path, names: Sequence[str], platform: Platform) -> list[Outcome]:
    drafts, log = [folders / name for name in names], folders.parent / f"{platform}.log"
    how = {"arch": platform.arch, "tp": platform.tp, "target": folders / TARGET_FOLDER}
    return asking.loaded(platform.engine, drafts, log=log, **how)


if __name__ == "__main__":
    sys.exit(main())
