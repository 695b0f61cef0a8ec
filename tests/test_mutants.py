"""`./scripts/test --mutants`: what is changed, which tests judge it, and what is said of it."""

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from draftquant.scripts.dev.mutants import __main__ as command
from draftquant.scripts.dev.mutants.changes import is_read, mutants_of
from draftquant.scripts.dev.mutants.recording import ROOMS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def changes(source: str, path: str = "quantize/m.py") -> set[tuple[str, str]]:
    """Operator and what the source becomes, in one line, of all mutants that can be read."""
    text = source.encode()
    found = set()
    for mutant in mutants_of(path, text):
        applied = mutant.applied(text)
        if is_read(path, applied):
            plain = applied.decode() if path.endswith(".toml") else ast.unparse(ast.parse(applied))
            found.add((mutant.operator, "; ".join(plain.split("\n"))))
    return found


PYTHON = r"""
a <= b in c => comparison: a < b in c | comparison: a <= b not in c
(a) - b => arithmetic: a + b
x = -a => arithmetic: x = a
x += y => arithmetic: x -= y
'a' + b =>
x = int | Path =>
x = True => boolean: x = False
x = 1.5 => constant: x = 2.5
x = not (a) => not: x = a
if a.b: ... => not: if not a.b:;     ...
(a) and b => and/or: a or b | conjunct dropped: a | conjunct dropped: b
[x for x in y if a] => conjunct dropped: [x for x in y]
def f():\n    return a => return: def f():;     return None
f(a, b=c) => call dropped: pass | keyword dropped: f(a)
x = zip(a, b, strict=True) =>
x = a.reshape(-1, 3) => constant: x = a.reshape(-1, 4)
x = sorted(a) => call dropped: x = a
x = a.b() => call dropped: x = a
x[a:b] => slice: x[:b] | slice: x[a:]
x = (a, b) => element: x = (a,) | element: x = (b,)
x = [a] => element: x = []
x = {\n    a,\n    b,\n}.c => element: x = {a}.c | element: x = {b}.c
x = {a: b, **c} => element: x = {**c} | element: x = {a: b}
x[a, b] =>
for a in b:\n    break => break/continue: for a in b:;     continue
def f(a: int, b: int, c: str): g = a => names exchanged: def f(a: int, b: int, c: str):;     g = b
assert a == 1 =>
@f(a=1)\ndef g(x: 'int | None' = None): ... =>
f'{a + 1}' =>
"""
"""Source => operator: what it becomes | ..."""


def test_python_changes_by_each_operator() -> None:
    for row in PYTHON.strip().split("\n"):
        source, _, expected = row.partition(" =>")
        made = {f"{kind}: {new}" for kind, new in changes(source.replace(r"\n", "\n"))}
        assert made == {*filter(None, expected.strip().split(" | "))}, source


def test_tables_lose_rows_entries_and_elements() -> None:
    table = 'a = 1\n[[row]]\nof = ["p", "q"]\n[other]\nwhole = true'
    changed = {
        (kind, "; ".join(filter(None, new.split("; ")))) for kind, new in changes(table, ".toml")
    }
    assert changed == {
        ("entry removed", '[[row]]; of = ["p", "q"]; [other]; whole = true'),
        ("entry removed", "a = 1; [[row]]; [other]; whole = true"),
        ("entry removed", 'a = 1; [[row]]; of = ["p", "q"]; [other]'),
        ("constant", 'a = 2; [[row]]; of = ["p", "q"]; [other]; whole = true'),
        ("row removed", "a = 1; [other]; whole = true"),
        ("row removed", 'a = 1; [[row]]; of = ["p", "q"]'),
        ("element", "a = 1; [[row]]; of = ['q']; [other]; whole = true"),
        ("element", "a = 1; [[row]]; of = ['p']; [other]; whole = true"),
        ("boolean", 'a = 1; [[row]]; of = ["p", "q"]; [other]; whole = false'),
    }


def test_mutants_listed_as_equivalent_are_still_made() -> None:
    rows = tomllib.loads((ROOT / "tests" / "equivalents.toml").read_text(encoding="utf-8"))
    for row in rows.get("equivalent", ()):
        assert row.keys() == {"path", "old", "new", "reason"}
        made = mutants_of(row["path"], (ROOT / row["path"]).read_bytes())
        assert (row["old"], row["new"]) in {(m.old, m.new) for m in made}, row


TOY = {
    **{f"{room}/__init__.py": "" for room in ROOMS},
    "pyproject.toml": (
        "[tool.pytest.ini_options]\n"
        'addopts = "--import-mode=importlib -p no:hypothesispytest"\npythonpath = ["tests"]\n'
    ),
    "quantize/toy.py": """
import os
from pathlib import Path
from string import digits
import tomllib

LOWEST = 1
SPARE = 9
FAR = 2
KINDS = ("a", digits)


def clipped(value: int, low: int, high: int) -> int:
    if value < low:
        return low
    return min(value, high)


def lowest() -> int:
    return LOWEST


def row(name: str) -> str:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return rows[name]["said"]


def ended(number: int) -> None:
    if number > 9:
        os._exit(0)


def never() -> int:
    return 1 + 1
""".lstrip(),
    "quantize/toy.toml": '[seen]\nsaid = "a"\n',
    "tests/test_toy.py": """
from draftquant.quantize.toy import clipped, ended, lowest, row
def test_clipped(): assert clipped(0, 2, 5) == 2
def test_between(): assert clipped(3, 2, 5) == 3
def test_lowest(): assert lowest() == 1
def test_row(): assert row("seen") == "a"
def test_ended(): assert ended(9) is None
""",
    "tests/test_far.py": """
from importlib import import_module
toy = import_module("draftquant.quanti" "ze.to" "y")
def test_what_no_word_tells(): assert vars(toy)["F" "AR"] == 2
""",
    "tests/conftest.py": 'pytest_plugins = ["workers"]',
    "tests/workers.py": (ROOT / "tests" / "workers.py").read_text(encoding="utf-8"),
    "tests/equivalents.toml": """
[[equivalent]]
path = "quantize/toy.py"
old = "if value < low:"
new = "if value <= low:"
reason = "both give low"
""",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a toy of one module and one table."""
    root = tmp_path_factory.mktemp("toy")
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    package = root / ".package" / "draftquant"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "quantize").symlink_to("../../quantize")
    (package / "scripts").symlink_to(ROOT / "scripts")
    return root


VERDICTS = {
    ("if value < low:", "if value <= low:"): None,  # listed as equivalent
    ("return low", "return high"): "killed",
    (
        "return min(value, high)",
        "return min(value, value)",
    ): "killed",  # by ruff: nothing uses the parameter
    ("if number > 9:", "if number >= 9:"): "survived",  # no test says that it fails
    ("return 1 + 1", "return 1 - 1"): "not covered",
    ("LOWEST = 1", "LOWEST = 2"): "killed",
    ("SPARE = 9", "SPARE = 10"): "survived",
    ("FAR = 2", "FAR = 3"): "killed",  # by a test that all are run for
    ('KINDS = ("a", digits)', 'KINDS = ("a", )'): "killed",  # by ruff: nothing uses the import
    ('KINDS = ("a", digits)', "KINDS = (, digits)"): "survived",
    ('[seen] said = "a"', ""): "killed",
}


def test_mutants_are_judged(toy: Path) -> None:
    tool = [sys.executable, "-m", "draftquant.scripts.dev.mutants", "--json", "quantize"]
    command = ["env", f"PYTHONPATH={toy / '.package'}", *tool]
    said = subprocess.run(command, cwd=toy, capture_output=True, text=True, check=False)
    assert said.returncode == 3, said.stderr
    judged = {(m["old"], m["new"]): m["verdict"] for m in json.loads(said.stdout)["mutants"]}
    assert {change: judged.get(change) for change in VERDICTS} == VERDICTS


def test_without_names_those_of_lines_that_changed_are_judged(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "clone"
    shutil.copytree(toy, root, symlinks=True, ignore=shutil.ignore_patterns("build"))
    monkeypatch.chdir(root)

    def commit(*files: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run([*command, "add", *files], check=True)
        subprocess.run([*command, "commit", "-q", "-m", "A change"], check=True)

    def said() -> str:
        assert command.main([]) == 0
        return "".join(capsys.readouterr())

    subprocess.run(["git", "init", "-q", "-b", "work", str(root)], check=True)
    commit(".")
    assert "holds one commit alone" in said()
    (root / "tests" / "test_more.py").touch()
    commit("tests")
    assert "0 mutants of lines that changed" in said()
    Path("quantize/toy.py").write_text(TOY["quantize/toy.py"] + "\n\nLIMIT = 3\n", "utf-8")
    assert command.changed_lines("HEAD") == {"quantize/toy.py": {34, 35, 36}}
    with pytest.raises(SystemExit):
        command.main(["--since", "v0"])
    assert "holds no such commit" in capsys.readouterr().err


def test_the_same_lines_are_drawn_as_long_as_they_stay() -> None:
    def olds(source: str) -> list[str]:
        drawn = command.drawn(mutants_of("quantize/m.py", source.encode()), "1")
        return [mutant.old for mutant in drawn[:20]]

    before = "".join(f"a = {number}\n" for number in range(40))
    assert len({*olds(before)}) == 20
    assert olds("b = c\n" + before) == olds(before)
