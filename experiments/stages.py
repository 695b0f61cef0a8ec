"""Long experiments in stages, each left out once `FOLDER/STAGE.seconds` says how long it took."""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The folder of everything that is never committed; `texts`: of the training, or shards."""

    folder: Path
    texts: int
    drafts: tuple[str, ...]

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def target(self) -> Path:
        """The converted model."""
        return self / "target"

    def tokenizer(self) -> "AutoTokenizer":
        """The target's."""
        return AutoTokenizer.from_pretrained(self.target)


Stages = Mapping[str, tuple[Callable[[Work], None], str]]
"""Name -> what is done, and how long that takes."""


def run_asked(stages: Stages, drafts: Iterable[str], texts: tuple[str, int, str]) -> int:
    """Run what the command line asks for, of a script with these stages and drafts.

    Args:
        texts: the option that says how many there are, its default and its help.
    """
    option, usual, told = texts
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="folder outside the tree")
    parser.add_argument(option, dest="texts", type=int, default=usual, help=told)
    parser.add_argument("--drafts", nargs="+", choices=drafts, default=tuple(drafts))
    parser.add_argument("--only", nargs="+", choices=stages, default=tuple(stages))
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    work = Work(folder=asked.work.resolve(), texts=asked.texts, drafts=tuple(asked.drafts))
    work.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.only:
        run, long = stages[name]
        done = work / f"{name}.seconds"
        if done.exists():
            continue
        print(f"{name}: {long}", flush=True)
        began = time.monotonic()
        run(work)
        done.write_text(f"{time.monotonic() - began:.0f}\n", encoding="utf-8")
    return 0
