"""What holds for the source as a whole: installed names, and which module may import what."""

import ast
import functools
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
MODULES = [
    path.relative_to(ROOT) for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))
]
BENCHMARKS = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
"""A package of the checkout alone, which imports draftquant as users do."""

Import = ast.Import | ast.ImportFrom


def imports(tree: ast.AST, *, in_function: bool = False) -> Iterator[tuple[Import, bool]]:
    """Every import statement, and whether it stands inside a function."""
    for node in ast.iter_child_nodes(tree):
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


def test_only_the_name_draftquant_is_installed(tmp_path: Path) -> None:
    """A second name for a module would give every class twice."""
    code = (
        "import draftquant.recipes, importlib.util as util;"
        f"print([name for name in {LAYERS} if util.find_spec(name)])"
    )
    command = (sys.executable, "-c", code)
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_the_wheel_holds_every_package_but_those_of_a_checkout() -> None:
    folders = {
        path.parent.relative_to(ROOT) for layer in LAYERS for path in ROOT.glob(f"{layer}/**/*.py")
    }
    with_init = {folder for folder in folders if (ROOT / folder / "__init__.py").is_file()}
    assert folders == with_init
    packages = {module_name(folder / "__init__.py") for folder in with_init}
    assert CHECKOUT_ONLY in packages
    installed = [".".join(name) for name in packages if name[:3] != CHECKOUT_ONLY]
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(installed)


def test_the_wheel_imports_nothing_that_only_a_checkout_has() -> None:
    found = {
        module.as_posix()
        for module in MODULES
        if module_name(module)[:3] != CHECKOUT_ONLY
        for node, _ in imports(parsed(module))
        for name in imported_names(module, node)
        if any((*name, alias.name)[:3] == CHECKOUT_ONLY for alias in node.names)
    }
    assert found == set()


def test_every_package_is_typed() -> None:
    assert all((ROOT / layer / "py.typed").is_file() for layer in LAYERS)


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


def test_the_reader_of_imports_sees_relative_and_nested_ones() -> None:
    tree = ast.parse(
        "from ..recipes import schema\nfrom . import plan\ndef f():\n  import quark.torch"
    )
    found = [
        (imported_names(Path("quantize/layouts/layout.py"), node), nested)
        for node, nested in imports(tree)
    ]
    assert found == [
        ([("draftquant", "quantize", "recipes")], False),
        ([("draftquant", "quantize", "layouts", "plan")], False),
        ([("quark", "torch")], True),
    ]


def test_modules_import_only_from_layers_below() -> None:
    faults = []
    for module in MODULES:
        own = LAYERS.index(module.parts[0])
        for node, _ in imports(parsed(module)):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            for name in imported_names(module, node):
                if relative and (len(name) < 2 or LAYERS.index(name[1]) > own):
                    faults.append(f"{module}:{node.lineno} imports {'.'.join(name)}")
                if not relative and name[0] == "draftquant":
                    faults.append(f"{module}:{node.lineno} is not relative")
    assert faults == []


def test_benchmarks_import_the_package_by_its_name_and_nothing_imports_them() -> None:
    """What they take of each other is relative."""
    found = {
        (module.parts[0] == "benchmarks", name[:2] == ("draftquant", "benchmarks"), name[0])
        for module in (*MODULES, *BENCHMARKS)
        for node, _ in imports(parsed(module))
        for name in imported_names(module, node)
    }
    relative = {own for own, within, _ in found if within}
    assert relative == {True}
    assert {top for _, _, top in found} & {*LAYERS, "benchmarks"} == set()


def test_no_module_imports_one_that_imports_it() -> None:
    """Also not in a function or for its types only, and however long the way round is."""
    names = {module_name(module): module for module in MODULES}
    imported: dict[Path, set[Path]] = {module: set() for module in MODULES}
    for module in MODULES:
        for node, _ in imports(parsed(module)):
            for name in imported_names(module, node):
                for alias in node.names:  # a module of the package, or what a module defines
                    found = names.get((*name, alias.name), names.get(name))
                    imported[module].update([found] if found else [])
    while free := [m for m in imported if not (imported[m] - {m}) & imported.keys()]:
        for module in free:
            del imported[module]
    assert sorted(map(str, imported)) == []


def test_vendor_toolkits_stay_in_functions_of_their_backends() -> None:
    faults = []
    for module in MODULES:
        for node, nested in imports(parsed(module)):
            for toolkit, *_ in imported_names(module, node):
                at_home = module.as_posix() in VENDORS.get(toolkit, ())
                if toolkit in VENDORS and not (at_home and nested):
                    faults.append(f"{module}:{node.lineno} imports {toolkit}")
    assert faults == []


def test_libraries_do_not_print() -> None:
    printing = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if module.parts[0] != "scripts"
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_every_extra_is_explained_by_a_sentence() -> None:
    """In pyproject.toml, the one place that lists them, right above its packages."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    lines = [line for line in section.splitlines() if line]
    extras = [i for i, line in enumerate(lines) if re.match(r"[\w-]+ = \[", line)]
    assert len(extras) == len(project()["project"]["optional-dependencies"])
    for i in extras:
        assert re.fullmatch(r"# .{15,}\.", lines[i - 1]), lines[i]


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
