"""The rooms of quantize, calibration and validate: which may import which. There is no circle.

And that what verifies imports nothing of what writes: an error must not hide in a common helper.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from draftquant.scripts.command_table import COMMANDS
from test_packaging import MODULES, ROOT, Imported, imported_by, module_name, names_in, parsed

QUANTIZE = (
    ("files", "gpus", "plugins"),
    ("asked", "drafts", "numerics"),
    ("algorithms", "stored"),
    ("layouts", "lints", "verify"),
    ("backends", "planning"),
    ("engines", "estimate"),
    ("grafting", "inspection", "listed_recipes", "making", "pairing"),
    ("asking", "estimated"),
)
CALIBRATION = (
    ("server_client", "traces"),
    ("passes", "prompts", "vocabulary"),
    ("linear_inputs", "recording"),
    ("dumps", "measured_cache", "rounding", "vllm"),
    ("runs",),
)
VALIDATE = (
    ("counting",),
    ("judging", "measure"),
    ("foreign", "parity"),
    ("served",),
    ("report",),
    ("comparison", "golden"),
    ("runs",),
)
HOUSES = {"quantize": QUANTIZE, "calibration": CALIBRATION, "validate": VALIDATE}
"""From the ground up: a room imports from floors below its own."""
FLOOR = {
    (house, room): floor
    for house, floors in HOUSES.items()
    for floor, rooms in enumerate(floors)
    for room in rooms
}
Room = tuple[str, str]
READING = {"asked", "files", "drafts", "stored"}
"""Rooms of which verification may reach what it likes, but for `WRITES`."""
WRITES = {"quantize/files/staging.py", "quantize/files/safetensors_file.py"}
"""The two modules through which every byte of an output goes."""


def room_of(module: Path) -> Room:
    """The house, and the folder in it, or the module itself where it lies flat."""
    house, room = module.with_suffix("").parts[:2]
    return house, room


def imports_between(modules: Sequence[Path]) -> Iterator[tuple[Path, int, tuple[str, ...]]]:
    """Importing module, line, and what it imports of another room of its house, the room first."""
    for module in modules:
        yield from of_other_rooms(module, imported_by(module))


def of_other_rooms(
    module: Path, found: Iterable[Imported]
) -> Iterator[tuple[Path, int, tuple[str, ...]]]:
    for node, _, names in found:
        for name in names:
            house, room = room_of(module)
            if name[:2] != ("draftquant", house):
                continue
            if len(name) > 2 and name[2] != room:
                yield module, node.lineno, name[2:]


def upward(found: Iterator[tuple[Path, int, tuple[str, ...]]]) -> list[str]:
    return [
        f"{module}:{line} imports {'.'.join(name)}"
        for module, line, name in found
        if FLOOR[module.parts[0], name[0]] >= FLOOR[room_of(module)]
    ]


ROOMS = [m for m in MODULES if m.parts[0] in HOUSES and m.parts[1] != "__init__.py"]


def test_every_room_has_its_floor() -> None:
    assert {room_of(module) for module in ROOMS} == set(FLOOR)
    assert len(FLOOR) == sum(len(rooms) for floors in HOUSES.values() for rooms in floors)


def test_rooms_import_only_downward() -> None:
    assert upward(imports_between(ROOMS)) == []


def test_what_verifies_reaches_nothing_that_writes() -> None:
    """Whatever its modules import, and what those import: an error cannot hide in a helper."""
    reached = reachable(m for m in ROOMS if room_of(m) == ("quantize", "verify"))
    assert len(reached) > 40
    inside = {room_of(module)[1] for module in reached if module.parts[0] == "quantize"}
    assert inside <= READING | {"verify"}
    assert {str(module) for module in reached} & WRITES == set()


def test_what_writes_asks_verification_for_its_answers_alone() -> None:
    """No value that is written comes from its helpers: it says itself what others may ask."""
    asking = [m for m in ROOMS if m.parts[0] == "quantize" and m.parts[1] != "verify"]
    taken = [name for _, _, name in imports_between(asking) if name[0] == "verify"]
    assert len(taken) > 4
    assert {name for name in taken if len(name) > 1} == set()


def reachable(modules: Iterable[Path]) -> set[Path]:
    """These modules of the packages, and all that they import, one from the other."""
    known = {module_name(module): module for module in MODULES}
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        found.add(module)
        for node, _, imported in imported_by(module):
            for name in imported:
                names = [name, *((*name, alias.name) for alias in node.names)]
                waiting += [known[n] for n in names if n in known and known[n] not in found]
    return found


def test_the_reader_of_rooms_sees_every_spelling() -> None:
    tree = ast.parse(
        "from ..numerics.fp8 import x\nfrom .. import layouts\nfrom ...recipes import y\n"
        "from .report import z\ndef f():\n  from ..backends import b\n"
    )
    codes = Path("quantize/verify/codes.py")
    found = list(of_other_rooms(codes, names_in(codes, tree)))
    assert [(line, name) for _, line, name in found] == [
        (1, ("numerics", "fp8")),
        (2, ("layouts",)),
        (6, ("backends",)),
    ]
    assert len(upward(iter(found))) == 2  # only numerics lies below verify


def test_what_families_share_knows_no_family() -> None:
    """`shared` and the interface know no family; a family knows at most DFlash and DSpark.

    Only what finds, reads and names all of them asks for the list.
    """
    room = Path("quantize/drafts")
    asking = {room / f"{name}.py" for name in ("__init__", "recognition")}
    known = {
        (module, name[4])
        for module in MODULES
        if module.is_relative_to(room) and module not in asking
        for _, _, names in imported_by(module)
        for name in names
        if name[1:4] == ("quantize", "drafts", "families") and len(name) > 4
    }
    others = {(m, family) for m, family in known if m.stem != family}
    assert {module.parts[2] for module, _ in known} == {"families"}
    assert {family for _, family in others} == {"dflash", "dspark"}


# ---- how large the house is: a line here may only be lowered (ARCHITECTURE.md, "Sums")

SUMS = {
    "words of the product": 367_999,
    "product folders": 49,
    "developers' tools, lines": 7_106,
    "lines of tests": 51_493,
    "pairs of a test file and an internal module": 1_019,
    "mutants of the sample that survive": 23,  # of 300: 8 %
    "verbs": 25,
    "words of pages by hand": 25_627,
}
SAMPLE = ROOT / "tests" / "mutants.toml"
SLACK = 0.01
"""Share by which a sum may fall before its line here has to follow."""
VERBS = frozenset(
    """
    card check clean compare completion dequantize estimate gate golden graft help inspect
    measure parity plan quantize recipes record replay report traces transcode unpickle verify
    vocab
    """.split()  # noqa: SIM905 - one a line would be a page
)
"""Those that stay; a further one has a row in ARCHITECTURE.md that says what left for it."""


def sums() -> dict[str, int]:
    """Every sum of `SUMS` as it is now."""
    product = [p for p in written() if p.parts[:2] != ("scripts", "dev")]
    tools = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "scripts" / "dev").rglob("*.py")]
    by_hand = [ROOT / "README.md", ROOT / "recipes" / "README.md", *(ROOT / "docs").glob("*.md")]
    by_hand += (ROOT / "docs" / "tutorials").glob("*.md")
    return {
        "words of the product": words_of(product),
        "product folders": len({path.parent for path in product if path.suffix == ".py"}),
        "developers' tools, lines": lines_of(tools),
        "lines of tests": lines_of(
            path for room in ("tests", "experiments") for path in (ROOT / room).rglob("*.py")
        ),
        "pairs of a test file and an internal module": sum(map(len, internals().values())),
        "mutants of the sample that survive": tomllib.loads(SAMPLE.read_text("utf-8"))["survived"],
        "verbs": len(COMMANDS),
        "words of pages by hand": words_of(by_hand),
    }


WRITTEN = (".html", ".json", ".py", ".toml", ".yaml")
"""Kinds of text in which a product can be written: a sentence that moves counts as before."""


def written() -> list[Path]:
    """Every text of the five packages, below the root."""
    packages = ("calibration", "quantize", "recipes", "scripts", "validate")
    texts = (p for package in packages for p in (ROOT / package).rglob("*"))
    return [p.relative_to(ROOT) for p in texts if p.suffix in WRITTEN]


def words_of(paths: Iterable[Path]) -> int:
    return sum(len((ROOT / path).read_text(encoding="utf-8").split()) for path in paths)


DOORS = ("draftquant.api", "draftquant.recipes.errors", "draftquant.scripts.cli")
"""What a test may import without being counted: functions, errors, and the command line."""


def internals() -> dict[str, set[str]]:
    """Test file -> modules of the product that it names, in imports or strings, but for `DOORS`."""
    packages = "recipes|quantize|calibration|validate|scripts"
    named = re.compile(rf"draftquant\.(?:{packages})(?:\.[a-z_0-9]+)+")
    files = (ROOT / "tests").glob("*.py")
    return {p.name: {*named.findall(p.read_text(encoding="utf-8"))} - {*DOORS} for p in files}


def product_modules() -> list[Path]:
    """Modules of the wheel that define something of their own: no `__init__`."""
    tools = ("scripts", "dev")
    return [m for m in MODULES if m.parts[:2] != tools and not m.name.startswith("__")]


def test_no_two_modules_share_a_name() -> None:
    names = Counter(module.name for module in product_modules())
    assert {name for name, number in names.items() if number > 1} == set()


def test_no_two_classes_share_a_name() -> None:
    product = [m for m in MODULES if m.parts[:2] != ("scripts", "dev")]
    nodes = (node for module in product for node in ast.walk(parsed(module)))
    classes = (node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, number in Counter(classes).items() if number > 1} == set()


def test_a_folder_holds_no_more_modules_than_one_can_look_over() -> None:
    """The verbs have one each, and may be 25."""
    folders = Counter(module.parent.as_posix() for module in product_modules())
    large = {folder: number for folder, number in folders.items() if number > 20}
    assert large.keys() <= {"scripts/verbs"}
    assert folders["scripts/verbs"] <= 25


def lines_of(modules: Iterable[Path]) -> int:
    return sum(len(module.read_text(encoding="utf-8").splitlines()) for module in modules)


def test_the_house_grows_in_no_sum() -> None:
    now = sums()
    assert now.keys() == SUMS.keys()
    grown = {name: (limit, now[name]) for name, limit in SUMS.items() if now[name] > limit}
    assert not grown, f"name what leaves for what comes (limit, now): {grown}"
    slack = {name: now[name] for name, limit in SUMS.items() if now[name] < (1 - SLACK) * limit}
    assert not slack, f"lower these lines of SUMS: {slack}"


def test_what_comes_says_what_left_for_it() -> None:
    """A verb that is not one of these has a row under "What came, and what left for it"."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    said = {line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("|")}
    came = set(COMMANDS) - VERBS
    assert came <= said
