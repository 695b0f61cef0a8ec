"""docs/: made pages and pictures are current, links lead somewhere, the site builds by itself."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.scripts.cli import every_parser
from draftquant.scripts.dev import demo
from draftquant.scripts.dev.docs import acceptance, choices, pictures
from draftquant.scripts.dev.docs.pages import PAGES
from draftquant.scripts.dev.docs.repository_links import on_page_markdown

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
def test_the_site_has_tables_needs_no_network_and_its_links_lead_to_something(
    tmp_path: Path,
) -> None:
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
