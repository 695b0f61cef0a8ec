"""Which tests are everyday and which are slow, and the CPU seconds of both: hooks of conftest.py.

`./scripts/test` runs the everyday tests, `./scripts/test --all` the slow ones too. A test is slow
by the marker `slow`; most cases of a test with many are slow by one of these:

- `each_value`: everyday are so few of its cases that each value of each parameter is in one.
- `some(N)`: everyday are N of its cases, spread over all of them.

`pytest -m "" --cpu-seconds tests/durations.toml`, in one process, measures every file anew.
"""

import gc
import resource
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Iterator, Sequence
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.toml")
BUDGET = 160.0
"""CPU seconds of all everyday tests, of which two workers need half: of the four minutes that
`./scripts/test` may take, ruff, mypy, imports and collecting take the rest.
"""
UNMEASURED = 3.0
"""CPU seconds that a file counts as until it is measured."""
_KINDS = ("everyday", "slow")
_seconds: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cpu-seconds FILE`."""
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write CPU seconds by file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that are slow, and begin with the longest files: two workers end together."""
    cases: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        some = found[0].get_closest_marker("some")
        if found[0].get_closest_marker("each_value") is not None:
            everyday = set(each_value([_values(item) for item in found]))
        elif some is not None:
            everyday = set(spread(len(found), *some.args))
        else:
            continue
        for number, item in enumerate(found):
            if number not in everyday:
                item.add_marker(pytest.mark.slow)
    seconds = sum(map(Counter, durations().values()), Counter[str]())
    items.sort(key=lambda item: (-seconds[item.path.name], item.path.name))


def durations() -> dict[str, dict[str, float]]:
    """Kind -> file -> the CPU seconds that are committed."""
    return tomllib.loads(DURATIONS.read_text(encoding="utf-8"))


def each_value(cases: Sequence[frozenset[tuple[str, Hashable]]]) -> Iterator[int]:
    """Numbers of cases in which each parameter has each of its values; first those all of new."""
    missing = set().union(*cases)
    for wanted in (frozenset.issubset, lambda case, left: bool(case & left)):
        for number, case in enumerate(cases):
            if missing and wanted(case, missing):
                missing -= case
                yield number


def spread(count: int, some: int) -> Iterator[int]:
    """So many numbers below `count`, at equal distances, the first one always."""
    some = min(some, count)
    return (number * count // some for number in range(some))


def _values(item: pytest.Function) -> frozenset[tuple[str, Hashable]]:
    params = item.callspec.params.items()
    return frozenset((n, v if isinstance(v, Hashable) else id(v)) for n, v in params)


def pytest_collection_finish() -> None:
    """Hardly anything here is garbage in circles, for which Python would look all the time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count what a test takes with its fixtures and child processes."""
    before = _cpu_seconds()
    result = yield
    kind = "everyday" if item.get_closest_marker("slow") is None else "slow"
    _seconds[kind][item.path.name] += _cpu_seconds() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was measured."""
    path = session.config.getoption("--cpu-seconds")
    if path is not None:
        path.write_text(table(_seconds), encoding="utf-8")


def table(seconds: dict[str, Counter[str]]) -> str:
    """TOML: a table of each kind, the longest first."""
    parts = []
    for kind in _KINDS:
        rows = [f'"{file}" = {taken:.1f}\n' for file, taken in seconds[kind].most_common()]
        parts.append(f"[{kind}] # {sum(seconds[kind].values()):.0f}\n{''.join(rows)}")
    return "# CPU seconds by file, as everyday.py says.\n\n" + "\n".join(parts)


def _cpu_seconds() -> float:
    taken = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in taken)
