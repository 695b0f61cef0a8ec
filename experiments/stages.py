"""Long experiments in stages, each left out once `FOLDER/STAGE.seconds` says how long it took."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

_Work = TypeVar("_Work")


def run_stages(
    stages: Mapping[str, tuple[Callable[[_Work], None], str]],
    names: Iterable[str],
    folder: Path,
    work: _Work,
) -> None:
    """Run those of `names` that are not done: name -> what is done, and how long that takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        run, long = stages[name]
        done = folder / f"{name}.seconds"
        if done.exists():
            continue
        print(f"{name}: {long}", flush=True)
        began = time.monotonic()
        run(work)
        done.write_text(f"{time.monotonic() - began:.0f}\n", encoding="utf-8")
