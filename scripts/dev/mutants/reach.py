"""Which everyday test runs which line of the product: as recorded, and kept in build/mutants.

A line counts as run where a statement of a function begins on it. Each file of tests is recorded
anew when it, a helper that it imports, or a module that it ran has changed, but not conftest.py.
"""

import functools
import hashlib
import json
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .changes import Mutant

ROOMS = ("recipes", "quantize", "calibration", "validate", "scripts")
TOOLS = "scripts/dev/"
"""Not of the product: no mutants are drawn from them."""
MOST_TESTS, MOST_SECONDS = 60, 20.0
"""Of the tests that run a line, those nearest to it that judge a mutant; at import half as many."""
MENTIONING = 5
"""Files of tests that come first for a mutant at import: they share words with it."""
Lines = dict[str, list[int]]


def product(root: Path, suffix: str) -> list[str]:
    """The product's modules or tables, relative to the root."""
    files = (path for room in ROOMS for path in sorted((root / room).rglob(f"*{suffix}")))
    return [p for file in files if not (p := file.relative_to(root).as_posix()).startswith(TOOLS)]


@dataclass(slots=True)
class Reach:
    """What is recorded.

    Attributes:
        seconds: test -> CPU seconds. ran: test -> path -> lines. size: test -> number of lines.
        imported: path -> lines that run when modules are imported or tests collected.
        made: path -> lines that run when folders are made which many tests read (tests/corpus.py).
    """

    seconds: dict[str, float] = field(default_factory=dict)
    ran: dict[str, Lines] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    imported: Lines = field(default_factory=dict)
    made: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, recorded: Mapping[str, Any]) -> None:
        """Add what was recorded of one file of tests."""
        for test, found in recorded["tests"].items():
            self.seconds[test], self.ran[test] = found["seconds"], found["lines"]
            self.size[test] = sum(map(len, found["lines"].values()))
            for path, lines in found["made"].items():
                self.made[path].update(lines)

    def chosen(self, root: Path, mutants: Iterable[Mutant]) -> Iterator[tuple[str, ...]]:
        """For each mutant, the tests that are to notice it, the nearest first."""
        readers: dict[str, list[str]] = {}
        running = self._running()
        texts = {f"tests/{p.name}": p.read_text("utf-8") for p in _files_of_tests(root)}
        for mutant in mutants:
            groups = []
            if not mutant.place.imported:
                groups.append(running.get((mutant.path, mutant.place.statement), []))
            if self.at_import(mutant):
                modules = _modules_of(root, mutant.path)
                of_modules = [
                    t for t, ran in self.ran.items() if not ran.keys().isdisjoint(modules)
                ]
                files = _mentioning(texts, mutant.old)
                groups.append([test for test in of_modules if test.partition("::")[0] in files])
                for name in mutant.place.names:
                    if name not in readers:
                        readers[name] = self._readers(root, name, running)
                    groups.append(readers[name])
                groups.append(of_modules)
            yield tuple(self._nearest(groups, 1 / 2 if self.at_import(mutant) else 1))

    def at_import(self, mutant: Mutant) -> bool:
        """Whether a mutant changes what runs before any test does."""
        here = self.imported.get(mutant.path, ())
        return mutant.place.imported or mutant.place.statement in here

    def _running(self) -> dict[tuple[str, int], list[str]]:
        running = defaultdict(list)
        for test, ran in self.ran.items():
            for path, lines in ran.items():
                for line in lines:
                    running[path, line].append(test)
        return running

    def _readers(
        self, root: Path, name: str, running: Mapping[tuple[str, int], list[str]]
    ) -> list[str]:
        """The tests that run a line on which a name stands."""
        lines: dict[str, list[int]] = defaultdict(list)
        for path, line in sorted(running):
            lines[path].append(line)
        pattern = re.compile(rf"\b{re.escape(name)}\b")
        found: dict[str, None] = {}
        for path, known in lines.items():
            text = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else ""
            for number in {text.count("\n", 0, m.start()) + 1 for m in pattern.finditer(text)}:
                statement = known[max(0, bisect(known, number) - 1)]
                found |= dict.fromkeys(running[path, statement])
        return list(found)

    def makes(self, mutant: Mutant) -> bool:
        """Whether a mutant has a hand in folders that many tests read."""
        return mutant.place.statement in self.made.get(mutant.path, ())

    def _nearest(self, groups: Sequence[Sequence[str]], share: float) -> Iterator[str]:
        """Those that run the fewest lines first, but one case of each test before a second one."""
        said: set[str] = set()
        seconds = 0.0
        for group in groups:
            cases: Counter[str] = Counter()
            ranked = []
            for test in sorted(group, key=lambda test: (self.size[test], test)):
                cases[test.partition("[")[0]] += 1
                ranked.append((cases[test.partition("[")[0]], test))
            for _, test in sorted(ranked, key=lambda pair: pair[0]):
                if test in said:
                    continue
                if said and (len(said) >= MOST_TESTS * share or seconds > MOST_SECONDS * share):
                    return
                said.add(test)
                seconds += self.seconds[test]
                yield test


def _mentioning(texts: Mapping[str, str], text: str) -> list[str]:
    """The files of tests that share most words with a text, the rarer ones for more."""
    weights: dict[str, float] = defaultdict(float)
    for word in sorted({*re.findall(r"[\w.-]{4,}", text)}):
        files = [file for file, said in texts.items() if word in said]
        for file in files:
            weights[file] += 1 / len(files) ** 2
    return sorted(weights, key=lambda file: -weights[file])[:MENTIONING]


def _files_of_tests(root: Path) -> list[Path]:
    return sorted((root / "tests").glob("test_*.py"))


def _modules_of(root: Path, path: str) -> list[str]:
    """The modules that a mutant of a file can change: its own, or those beside a table."""
    beside = sorted((root / path).parent.glob("*.py"))
    return [path] if path.endswith(".py") else [p.relative_to(root).as_posix() for p in beside]


# ---- Kept by content


def known_reach(root: Path, folder: Path, changed: Iterable[str]) -> tuple[Reach, list[str]]:
    """What is kept of all files of tests, and those that have to be recorded (anew).

    Args:
        changed: the mutated sources; a file of tests that ran none of them needs no new record.
    """
    reach, missing = Reach(imported=_imported(root, folder)), []
    kept = {f"tests/{p.name}": p for p in _files_of_tests(root)}
    records = {name: _read(folder / f"{path.stem}.json") for name, path in kept.items()}
    of_interest = {path for path in changed if path.endswith(".py")}
    seen = {path for record in records.values() for path in record.get("sources", ())}
    for name, record in records.items():
        own = _tests_and_helpers(root, name)
        sources = {**dict.fromkeys(own, ""), **record.get("sources", {})}
        looked = own | (sources.keys() & of_interest if of_interest <= seen else sources.keys())
        if all(_hash(root, path) == sources[path] for path in looked):
            reach.add(record)
        else:
            missing.append(name)
    return reach, missing


def keep(root: Path, recorded: Path, folder: Path, files: Iterable[str]) -> None:
    """Make the records of files of tests from what recorders wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    tests: dict[str, dict[str, Any]] = {name: {} for name in files}
    for part in recorded.glob("*.tests"):
        for line in part.read_text("utf-8").splitlines():
            said = json.loads(line)
            tests[said["test"].partition("::")[0]][said["test"]] = said
    for name, found in tests.items():
        ran = {path for said in found.values() for path in said["lines"]}
        sources = {path: _hash(root, path) for path in sorted(ran | _tests_and_helpers(root, name))}
        write(folder / f"{Path(name).stem}.json", {"sources": sources, "tests": found})
    lines = _read(recorded / "imported.json")
    for path, before in _imported(root, folder).items():  # by files that were not collected now
        lines[path] = sorted({*before, *lines.get(path, ())})
    sources = {path: _hash(root, path) for path in lines}
    write(folder / "imported.json", {"sources": sources, "lines": lines})


def _imported(root: Path, folder: Path) -> Lines:
    """What runs at import, of the modules that are as they were."""
    record = _read(folder / "imported.json")
    lines: Lines = record.get("lines", {})
    return {path: lines[path] for path in lines if _hash(root, path) == record["sources"][path]}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def write(path: Path, record: object) -> None:
    """As JSON."""
    path.write_text(json.dumps(record), encoding="utf-8")


@functools.cache
def _hash(root: Path, path: str) -> str:
    file = root / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _tests_and_helpers(root: Path, name: str) -> set[str]:
    """A file of tests, and the helpers beside it that it imports, or that they do."""
    found, waiting = set(), [name]
    while waiting:
        path = waiting.pop()
        if path in found or not (root / path).is_file():
            continue
        found.add(path)
        text = (root / path).read_text(encoding="utf-8")
        words = re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)
        waiting += [f"tests/{word}.py" for word in words]
    return found
