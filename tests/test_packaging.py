"""What holds for the source as a whole: installed names, and which module may import what."""

import ast
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAYERS = ("recipes", "quantize", "calibration", "validate", "scripts")  # each imports from the left
VENDORS = {
    "quark": {"quantize/backends/quark_backend.py"},
    "modelopt": {"quantize/backends/modelopt_backend.py"},
    "compressed_tensors": set(),
}
MAX_LINES = 500
FACADE = Path("scripts/draftquant")
"""Installed as `draftquant` itself: the other packages are linked beside it."""
PACKAGE = ROOT / ".package" / "draftquant"
CHECKOUT_ONLY = ("draftquant", "scripts", "dev")
"""The package that the wheel leaves out: users need nothing of it."""
MODULES = [p.relative_to(ROOT) for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]
BENCHMARKS = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
"""A package of the checkout alone, which imports draftquant as users do."""

Import = ast.Import | ast.ImportFrom


def imports(tree: ast.AST, *, in_function: bool = False) -> Iterator[tuple[Import, bool]]:
    """Every import statement, and whether it stands inside a function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue  # no expression holds one
        if isinstance(node, Import):
            yield node, in_function
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from imports(node, in_function=inside)


def imported_names(module: Path, node: Import) -> list[tuple[str, ...]]:
    """Absolute names of the imported modules, as tuples of their parts."""
    if isinstance(node, ast.Import):
        return [tuple(alias.name.split(".")) for alias in node.names]
    if node.level == 0:
        return [tuple((node.module or "").split("."))]
    base = installed_parts(module)[: -node.level]
    if node.module is None:
        return [(*base, alias.name) for alias in node.names]
    return [(*base, *node.module.split("."))]


def installed_parts(module: Path) -> tuple[str, ...]:
    """The parts of its dotted name, `__init__` too."""
    home = module.relative_to(FACADE) if module.is_relative_to(FACADE) else module
    return ("draftquant", *home.with_suffix("").parts)


def module_name(module: Path) -> tuple[str, ...]:
    """The parts of its dotted name; a package is named by its folder."""
    parts = installed_parts(module)
    return parts[:-1] if parts[-1] == "__init__" else parts


@functools.cache
def parsed(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_holds_every_package_but_those_of_a_checkout() -> None:
    modules = [path for layer in LAYERS for path in ROOT.glob(f"{layer}/**/*.py")]
    folders = {path.parent.relative_to(ROOT) for path in modules}
    with_init = {folder for folder in folders if (ROOT / folder / "__init__.py").is_file()}
    assert folders == with_init
    packages = {module_name(folder / "__init__.py") for folder in with_init}
    assert CHECKOUT_ONLY in packages
    installed = [".".join(name) for name in packages if name[:3] != CHECKOUT_ONLY]
    assert all((ROOT / layer / "py.typed").is_file() for layer in LAYERS)
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(installed)


def test_the_package_is_links_to_the_folders_of_the_root() -> None:
    """What an editable install puts on the path: relative links to all of it, and nothing else."""
    links = {path.name: path for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    files = {path.name for path in (ROOT / FACADE).iterdir() if path.is_file()}
    assert set(links) == files | set(LAYERS)
    for name, link in links.items():
        home = Path(name) if name in LAYERS else FACADE / name
        assert link.readlink() == Path("../..") / home
    made = "draftquant.egg-info"  # by an editable install
    found = {path.name for path in PACKAGE.parent.iterdir()} - {made}
    assert found == {"draftquant", "benchmarks"}
    assert (PACKAGE.parent / "benchmarks").readlink() == Path("../benchmarks")


Imported = tuple[Import, bool, Sequence[tuple[str, ...]]]
"""An import, whether it stands inside a function, and the absolute names."""


@functools.cache
def imported_by(module: Path) -> list[Imported]:
    return names_in(module, parsed(module))


def names_in(module: Path, tree: ast.Module) -> list[Imported]:
    return [(node, nested, imported_names(module, node)) for node, nested in imports(tree)]


def test_modules_import_from_layers_below_and_vendors_in_functions_of_their_backends() -> None:
    """And no module of the wheel one that only a checkout has."""
    faults = []
    for module in MODULES:
        own = LAYERS.index(module.parts[0])
        for node, nested, names in imported_by(module):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            for name in names:
                below = len(name) > 1 and name[1] in LAYERS and LAYERS.index(name[1]) <= own
                at_home = nested and module.as_posix() in VENDORS.get(name[0], ())
                of_checkout = any((*name, a.name)[:3] == CHECKOUT_ONLY for a in node.names)
                if (
                    (relative and not below)
                    or (not relative and name[0] in ("draftquant", "benchmarks", *LAYERS))
                    or (name[0] in VENDORS and not at_home)
                    or (of_checkout and module_name(module)[:3] != CHECKOUT_ONLY)
                ):
                    faults.append(f"{module}:{node.lineno} imports {'.'.join(name)}")
    for module in BENCHMARKS:  # what they take of each other is relative
        faults += [
            f"{module} imports {'.'.join(name)}"
            for _, _, names in imported_by(module)
            for name in names
            if name[0] in (*LAYERS, "benchmarks")
        ]
    assert faults == []


def test_no_module_imports_one_that_imports_it() -> None:
    """Also not in a function or for its types only, and however long the way round is."""
    modules = {module_name(module): module for module in MODULES}
    imported: dict[Path, set[Path]] = {module: set() for module in MODULES}
    for module in MODULES:
        for node, _, names in imported_by(module):
            for name in names:
                for alias in node.names:  # a module of the package, or what a module defines
                    found = modules.get((*name, alias.name), modules.get(name))
                    imported[module].update([found] if found else [])
    while free := [m for m in imported if not (imported[m] - {m}) & imported.keys()]:
        for module in free:
            del imported[module]
    assert sorted(map(str, imported)) == []


def test_every_extra_that_somebody_is_told_to_install_exists() -> None:
    """In messages, documents and pip's lines of them: draftquant[NAME], .[NAME,NAME]."""
    known = set(project()["project"]["optional-dependencies"])
    texts = [(ROOT / module).read_text(encoding="utf-8") for module in MODULES]
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")]
    texts += [path.read_text(encoding="utf-8") for path in documents]
    asked = re.findall(r"(?:draftquant|'\.)\[([a-z, ]+)\]", "\n".join(texts))
    calls = r"(?:install_line\(|imported\([^,\n]+, )[\"']([a-z]+)[\"']"
    asked += re.findall(calls, "\n".join(texts))
    named = {name.strip() for group in asked for name in group.split(",")}
    assert {"quark", "modelopt", "accelerate", "parquet"} <= named <= known


def test_the_pins_hold_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    about = project()["project"]
    wanted = [*about["dependencies"], *itertools.chain(*about["optional-dependencies"].values())]
    names = {re.split(r"[\[=<>~!]", name)[0].lower().replace("_", "-") for name in wanted}
    assert sorted(names - pinned) == ["lm-eval"]  # of another environment, as its extra says


def test_the_lower_bounds_are_those_that_are_tested() -> None:
    """Of every dependency that has one: what `./scripts/test --oldest` installs."""
    lines = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    bounds = dict(each.split(">=") for each in project()["project"]["dependencies"] if ">=" in each)
    assert {"torch", "transformers", "huggingface_hub", "safetensors"} <= bounds.keys()
    ends = re.compile(r"(\.0)+$")
    assert {name: ends.sub("", version) for name, version in tested.items()} == {
        name: ends.sub("", version) for name, version in bounds.items()
    }


def test_every_module_is_short() -> None:
    modules = (*MODULES, *BENCHMARKS)
    lines = {m.as_posix(): len((ROOT / m).read_text("utf-8").splitlines()) for m in modules}
    assert {module: count for module, count in lines.items() if count > MAX_LINES} == {}
