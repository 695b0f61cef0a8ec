"""docs/: made pages and pictures are current, links lead somewhere, the site builds by itself."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.scripts.cli import every_parser, main
from draftquant.scripts.dev import demo
from draftquant.scripts.dev.docs import acceptance, choices, pictures
from draftquant.scripts.dev.docs.pages import PAGES
from draftquant.scripts.dev.docs.repository_links import on_page_markdown
from draftquant.validate.judging.policy import POLICIES
from draftquant.validate.runs import auto_run
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
AGAIN = "run: ./scripts/test --docs"
MADE = {**PAGES, **pictures.PICTURES}


@pytest.mark.parametrize(
    "name", [*PAGES, *(pytest.param(n, marks=pytest.mark.slow) for n in pictures.PICTURES)]
)
def test_what_is_made_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == MADE[name](), AGAIN


# Which recipe


@pytest.fixture(scope="module")
def advised() -> Sequence[choices.Choice]:
    return choices.choices()


@pytest.mark.slow
def test_the_advice_is_what_was_measured_best(advised: Sequence[choices.Choice]) -> None:
    measured = acceptance.measured_changes()
    for row in advised:
        for name in (row.fp8, row.int4, row.fp4):
            if name is not None:
                assert {change.verdict for change in measured[name].values()} == {"PASS"}
    of_b200 = [row for row in advised if "B200" in row.gpus]
    assert {row.fp8 for row in of_b200} == {"blackwell-fp8-mla"}  # called after the GPU
    assert [(row.int4, row.fp4) for row in of_b200] == [
        ("int4-channel-gptq", "mxfp4-weights-gptq"),  # smaller than INT4 in groups, and than NVFP4
        ("int4-channel-gptq", "nvfp4-weights-gptq"),  # SGLang loads MXFP4 with MXFP4 inputs only
        ("mi325x-w4a8-gptq", None),  # of an MLA draft SGLang loads no other weights of four bits
    ]
    assert {row.fp4 for row in advised if "MI325X" in row.gpus} == {None}  # emulated there


def test_an_emulated_format_is_not_advised() -> None:
    """MXFP4 loads on MI300X, where it is slower than BF16."""
    assert not choices._is_small(load_recipe("mi355-mxfp4"), "gfx942")
    assert choices._is_small(load_recipe("mi355-mxfp4"), "gfx950")
    assert not choices._is_small(load_recipe("mi325x-w4a8-fp8"), "gfx950")  # a byte each


@pytest.mark.slow
def test_the_advice_is_on_its_pages() -> None:
    assert choices.short_table() in README.read_text(encoding="utf-8")
    assert choices.choices_table() in (DOCS / "recipes.md").read_text(encoding="utf-8")


def test_readme_is_one_screen_and_a_half() -> None:
    text = README.read_text(encoding="utf-8")
    assert f"[all {len(built_in_recipes())}]" in text
    assert len(text.splitlines()) <= 70
    assert max(map(len, text.splitlines())) <= 120
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 88  # of a column


def test_the_demo_shows_each_verdict() -> None:
    measured = acceptance.measured_changes()
    verdicts = [measured[recipe][demo.PAIR.name].verdict for recipe in demo.RECIPES.values()]
    assert verdicts == ["PASS", "INCONCLUSIVE", "FAIL"]


# Commands


def test_every_command_of_a_page_is_one() -> None:
    parser, pages = every_parser(), [README, *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in re.findall(r"^(?:\$ )?draftquant (.*)", block, re.MULTILINE):
                assert parser.parse_args(shlex.split(line, comments=True)), f"{page}: {line}"


# The site


def test_links_into_the_repository_are_led() -> None:
    for page, link, led in (
        ("a/b.md", "../../tests/wild", "../repository/tests/wild/README.md"),
        ("a/b.md", "../../recipes/README.md#rules", "../repository/recipes/README.md#rules"),
        ("b.md", "exact.md", "exact.md"),
        ("b.md", "../../outside.md", "../../outside.md"),
        ("b.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("repository/README.md", "docs/gate.md#the-verdict", "../gate.md#the-verdict"),
        ("repository/recipes/README.md", "../ARCHITECTURE.md", "../ARCHITECTURE.md"),
    ):
        made = on_page_markdown(
            f"[text]({link})",
            page=SimpleNamespace(file=SimpleNamespace(src_uri=page)),
            config=SimpleNamespace(config_file_path=str(ROOT / ".mkdocs.yml")),
        )
        assert made == f"[text]({led})"


@pytest.mark.slow
def test_the_site_has_tables_needs_no_network_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build = ["mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.resolve(): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert len(pages) > 15
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    for page, text in pages.items():
        assert "|---|" not in text, page
        for url in re.findall(r'<(?:link|script|img)\b[^>]*?\b(?:src|href)="([^"]*)"', text):
            assert not re.match(r"[a-z]+:|//", url), f"{page}: {url}"
        for url in re.findall(r'<a\b[^>]*?\bhref="([^"]*)"', text):
            path, _, anchor = url.partition("#")
            if re.match(r"[a-z]+:|/", path) or not url or page.name == "404.html":
                continue
            led = (page.parent / path).resolve() if path else page
            led = led / "index.html" if led.is_dir() else led
            assert led.is_file(), f"{page}: {url}"
            if anchor and led.suffix == ".html":
                assert re.search(rf'\b(?:id|name)="{re.escape(anchor)}"', pages[led]), url


def test_every_link_in_the_repository_leads_to_a_file() -> None:
    """What GitHub shows: relative links of every page that is written here."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("recipes/*.md")]
    pages += [*ROOT.glob("tests/*/*.md"), *ROOT.glob("experiments/**/*.md")]
    links = re.compile(r"\]\(([^)\s#]+)(?:#([^)\s]*))?\)")
    for page in pages:
        for path, anchor in links.findall(page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", path):
                continue
            target = page.parent / path
            assert target.exists(), f"{page}: {path}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page}: {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name == "index.md" or f"({name}" in index, name


# ---- the shell blocks of README and of the tutorials run as they stand, in a folder like a clone


GUIDES = ("README.md", "docs/tutorials/amd.md", "docs/tutorials/nvidia.md", "docs/tutorials/ci.md")
NUM_PROMPTS = 4
VERDICTS = (0, 1, 3)  # of the gate; everything else has to succeed


def commands_of(script: str, folder: Path) -> list[list[str]]:
    """The `draftquant` commands of a script, expanded by bash."""
    spy = 'draftquant() { printf "%s\\0" "$@" >&3; printf "\\n\\0" >&3; }\n'
    written = folder / "commands"
    with written.open("wb") as file:
        bash = ["bash", "-euo", "pipefail", "-c", f"exec 3>&1 >/dev/null\n{spy}{script}"]
        subprocess.run(bash, stdout=file, cwd=folder, check=True)
    calls = written.read_text(encoding="utf-8").split("\0\n\0")
    return [call.split("\0") for call in calls if call]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that has the pairs where a clone has them."""
    for pair in ("eagle3-llama", "eagle3-mla", "dflash"):
        source, copy = ROOT / "tests/pairs" / pair, tmp_path / "tests/pairs" / pair
        copy.mkdir(parents=True)
        for name in ("draft", "target"):
            (copy / name).symlink_to(source / name)
        for name in ("prompts.jsonl", "calibration.jsonl"):
            lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
            (copy / name).write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", GUIDES)
def test_the_commands_run(page: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (ROOT / page).read_text(encoding="utf-8").split("\n```")
    blocks = [part.partition("\n")[2] for part in parts if part.partition("\n")[0] == "sh"]
    commands = commands_of("\n".join(blocks), clone)
    assert len(commands) >= 4
    monkeypatch.chdir(clone)
    few = dataclasses.replace(POLICIES["release"], name="custom", min_prompts=2)
    monkeypatch.setattr(auto_run, "_RELEASE", few)
    for command in commands:
        assert main(command) in (VERDICTS if command[0] == "gate" else (0,)), command


# ---- the notebook of the tutorials, run as it stands by a kernel of this interpreter


NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def outputs(notebook: Any, start: str) -> list[Any]:
    """What the one cell gave whose source has these words."""
    (cell,) = (each for each in notebook.cells if start in each.source)
    found: list[Any] = cell.outputs
    return found


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all((cell.outputs, cell.execution_count) == ([], None) for cell in code)


@pytest.mark.slow
def test_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short reports, bars while it runs, the page of the gate, and the picture."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # no settings of the tester's own are read
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    executed = NotebookClient(notebook, timeout=600, resources=where).execute()
    of_gate = outputs(executed, "report = dq.gate(")
    (shown,) = (each for each in of_gate if "execution_count" in each)
    assert "<iframe srcdoc=" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<GateReport PASS; acceptance length ")
    (verified,) = outputs(executed, "dq.verify(")[-1:]
    assert verified.data["text/plain"].startswith("<Verification verified, every byte; ")
    assert '<table class="dq">' in verified.data["text/html"]
    bars = [each for each in outputs(executed, "traces = dq.record(") if "data" in each]
    assert any("<progress " in each.data.get("text/html", "") for each in bars)
    (error,) = outputs(executed, "except dq.DraftQuantError")
    assert error.text.startswith("gate(num_draft_tokens=): expected at least 1, got 0\n  fix: ")
    every = [each.get("data", {}) for cell in executed.cells for each in cell.get("outputs", ())]
    assert any("image/svg+xml" in data for data in every)
    assert max(len(data.get("text/plain", "")) for data in every) < 600
