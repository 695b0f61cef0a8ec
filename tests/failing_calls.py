"""Let every call on a file fail in turn, and look at what becomes of the run.

Over quantize, dequantize and record, on tiny inputs. Full disks, errors of the device,
short writes and short reads: each run must end in an error that says what is wrong, with nothing
left, or with the very output of an undisturbed run.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from io_faults import KINDS, FailingDisk
from publishers import Publisher, contents, exit_code, make_publishers, quiet

_OUTCOMES = ("error, nothing left", "correct output", "error after publishing")
_ERRORS = (1, 2)  # verification says no, bad input or output


@dataclass(slots=True, kw_only=True)
class IoFaults:
    """What was found; `problems` says what should not be.

    Attributes:
        calls: of an undisturbed run, by command and by name of the call.
        outcomes: of the faults, by command.
    """

    calls: dict[str, Counter[str]] = field(default_factory=dict)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def fail_calls(work: Path, *, every: int) -> IoFaults:
    """Fail every n-th call of each command, in a new folder `work`; see the module."""
    found, log = IoFaults(), work.with_suffix(".log")
    for publisher in make_publishers(work, divide=64, log=log, new_tokens=8):
        calls = _calls_of(publisher, work, log)
        published, source = contents(publisher.out), contents(publisher.source)
        publisher.remove()
        found.calls[publisher.name] = Counter(calls)
        seen = found.outcomes[publisher.name] = Counter()
        cases = [(at, fault) for at, name in enumerate(calls) for fault in KINDS[name]]
        for at, fault in cases[::every]:
            code = exit_code(publisher.start(_failing(FailingDisk(work, at=at, fault=fault), log)))
            outcome = _outcome(publisher, code, published)
            seen[outcome] += 1
            if outcome not in _OUTCOMES or contents(publisher.source) != source:
                found.problems.append(
                    f"{publisher.name}, {fault} at call {at} ({calls[at]}): {outcome}"
                )
            publisher.remove()
    return found


def _calls_of(publisher: Publisher, work: Path, log: Path) -> list[str]:
    """The calls of an undisturbed run, in order; its output stays."""
    listed = work.with_suffix(".calls")
    disk = FailingDisk(work)

    def run() -> None:
        _failing(disk, log)()

    def note() -> None:
        listed.write_text("\n".join(disk.seen), encoding="utf-8")

    code = exit_code(publisher.start(run, note))
    if code or not publisher.out.exists():
        raise RuntimeError(f"{publisher.name} ended with {code} on a good disk; see {log}")
    return listed.read_text(encoding="utf-8").split("\n")


def _failing(disk: FailingDisk, log: Path) -> Callable[[], None]:
    def prepare() -> None:
        quiet(log)()
        disk.install()

    return prepare


def _outcome(publisher: Publisher, code: int, published: dict[str, str]) -> str:
    left = [path.name for path in publisher.out.parent.iterdir() if path != publisher.out]
    if left:
        return f"exit code {code}, and left {', '.join(left)}"
    if not publisher.out.exists():
        return "error, nothing left" if code in _ERRORS else f"exit code {code}, no output"
    if contents(publisher.out) != published:
        return f"exit code {code}, and a wrong output"
    if code == 0:
        return "correct output"
    return "error after publishing" if code in _ERRORS else f"exit code {code} after publishing"
