"""Kill quantize, dequantize and record at random moments, and look at what they leave.

After SIGKILL the output is absent or complete, beside it lies nothing but the staging folder of
the dead process, which looks unlike what it was to become, the source is unchanged, and the next
run succeeds and removes that folder. After SIGTERM, SIGHUP and SIGINT nothing is left at all.
"""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from draftquant.quantize.files.staging import find_staging
from publishers import FAILED, Publisher, contents, exit_code, make_publishers, quiet

SOFT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_LATEST = 1.05  # of the duration of an undisturbed run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undisturbed:
    """A run that nobody killed."""

    seconds: float
    code: int
    published: dict[str, str]
    source: dict[str, str]


def kill_runs(
    work: Path, *, kills: int, signals: int, seed: int, divide: int, new_tokens: int
) -> tuple[int, list[str]]:
    """Kill runs in a new folder `work`: how many, and what should not be."""
    chance, problems = random.Random(seed), list[str]()
    log = work.with_suffix(".log")
    publishers = make_publishers(work, divide=divide, log=log, new_tokens=new_tokens)
    undisturbed = {one.name: _undisturbed(one, log) for one in publishers}
    rounds = [signal.SIGKILL] * kills + [SOFT_SIGNALS[i % 3] for i in range(signals)]
    for turn, number in enumerate(rounds):
        publisher = publishers[turn % len(publishers)]
        whole = undisturbed[publisher.name]
        delay = chance.uniform(0, _LATEST * whole.seconds)
        problems += [
            f"{publisher.name}, {number.name} after {delay:.3f} s: {problem}"
            for problem in _kill(publisher, whole, number, delay, log)
        ]
        publisher.remove()
    return len(rounds), problems


def _undisturbed(publisher: Publisher, log: Path) -> _Undisturbed:
    exit_code(publisher.start(quiet(log)))  # the first one reads from the disk
    publisher.remove()
    began = time.perf_counter()
    code = exit_code(publisher.start(quiet(log)))
    seconds = time.perf_counter() - began
    if not publisher.out.exists():
        raise RuntimeError(f"{publisher.name} published nothing; see {log}")
    published = contents(publisher.out)
    publisher.remove()
    source = contents(publisher.source)
    return _Undisturbed(seconds=seconds, code=code, published=published, source=source)


def _kill(
    publisher: Publisher, whole: _Undisturbed, number: signal.Signals, delay: float, log: Path
) -> list[str]:
    """Kill one run, and look."""
    pid = publisher.start(quiet(log))
    time.sleep(delay)
    os.kill(pid, number)  # not yet waited for, so the number is still its own
    problems = [] if exit_code(pid) != FAILED else ["a traceback"]
    if publisher.out.exists() and contents(publisher.out) != whole.published:
        problems.append("the output is not whole")
    beside = [path for path in publisher.out.parent.iterdir() if path != publisher.out]
    staged = [one for one in find_staging(publisher.out.parent) if one.path in beside]
    if len(staged) != len(beside):
        problems.append(f"beside the output: {', '.join(path.name for path in beside)}")
    for staging in staged:
        if staging.is_live or staging.out != publisher.out.name:
            problems.append(f"{staging.path.name} does not say that its process is dead")
        last = staging.path / publisher.last
        if last.exists() and contents(staging.path) != whole.published:
            problems.append(f"{publisher.last} in a staging folder that is not whole")
    if number != signal.SIGKILL and staged:
        problems.append("a staging folder is left")
    if contents(publisher.source) != whole.source:
        problems.append("the source changed")
    return problems + _next_run(publisher, whole, log)


def _next_run(publisher: Publisher, whole: _Undisturbed, log: Path) -> list[str]:
    """It succeeds, and leaves its output alone in the folder."""
    if not publisher.out.exists() and exit_code(publisher.start(quiet(log))) != whole.code:
        return ["the next run failed"]
    if not publisher.out.exists() or contents(publisher.out) != whole.published:
        return ["the next run published something else"]
    left = [path.name for path in publisher.out.parent.iterdir() if path != publisher.out]
    return [f"the next run left {', '.join(left)}"] if left else []
