"""Words of the pages: the glossary has every term of the program, and no page has house slang."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftquant.quantize.drafts import FAMILIES
from draftquant.quantize.engines.contract import Verdict as EngineVerdict
from draftquant.recipes.formats import NUMBER_FORMATS, ActivationDtype, Granularity
from draftquant.recipes.schema import BackendName, LayoutName, RoundingChoice, ScaleChoice
from draftquant.validate.judging.policy import POLICIES, Spending, Verdict
from test_packaging import MODULES, parsed

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/glossary.md"
OF_DOCS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")]
PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", *OF_DOCS]

BANNED = {
    r"\bcarriers?\b": "the dtype that stores the values",
    r"(?<!exit )\bcodes\b": "quantized values",
    r"\b(taught|teach(es|ing)?)\b": "fine-tuned, fine-tune",
    r"\blatent (one|attention)\b": "MLA",
    r"\bin effect\b": "effective sample size",
    r"\d G (parameters|weights)\b": "3.2B parameters",
    r"\b(\d|planned|more) looks?\b|\blook i\b": "planned interim analysis",
    r"\b(sm\d+|gfx\d+) alone\b": "H200 (sm90)",
    r"\b(a|each|every|equal|all|the|of) rounds?\b(?! to)": "verify step",
    r"\bof which (alone|it)\b": "a sentence with a subject",
    r"\byour word\b|\bis believed\b|\bnot believed\b": "reported, declared, verified",
    r"what (a|the) (linear|draft) (really )?reads": "the linear's inputs",
}
"""What no page says, outside of code -> what it says instead."""
HOUSE = {
    r"\bbehind (it|its|the|an?|each|this|that|them)\b": "after",
    r"\bsuch an?\b": "this, that, like it",
    r"\bof which (no|none|each|all|the)\b": "a sentence with a subject",
    r"\blikewise\b": "too, as above",
    r"\bof (theirs|ours)\b": "their, our",
    r"\bis believed\b": "is used, is trusted",
    r"\bwhat is not said\b": "the other keys",
}
"""What neither a page nor a docstring says -> what it says instead."""


def prose(page: Path) -> str:
    """The text of a page without its blocks and spans of code, links and generated tables."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- written by .*?<!-- end", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|^    .*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - {GLOSSARY}), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_a_page_is_in_plain_words(page: Path) -> None:
    assert list(slang(prose(page), BANNED | HOUSE)) == []


def test_docstrings_and_errors_are_in_plain_words() -> None:
    told = [(module, *each) for module in MODULES for each in told_in(parsed(module))]
    found = [f"{module}: {said}" for module, text, words in told for said in slang(text, words)]
    assert found == []


OF_ERRORS = HOUSE | {r"(?<!\.\.)\.$": "no full stop"}


def told_in(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Docstrings, and what every error says with its fix, with `7` for what they quote."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value), HOUSE
        fixes = [kw.value for kw in getattr(node, "keywords", ()) if kw.arg == "fix"]
        if not (isinstance(node, ast.Call) and fixes):
            continue
        for part in (*node.args[1:], *fixes):
            match part:
                case ast.Constant(str(text)):
                    yield text, OF_ERRORS
                case ast.JoinedStr(values):
                    texts = (v.value if isinstance(v, ast.Constant) else "7" for v in values)
                    yield "".join(map(str, texts)), OF_ERRORS


def slang(text: str, words: dict[str, str]) -> Iterator[str]:
    """Where a text has one of the words, and what to say instead."""
    text = " ".join(text.split())
    for word, better in words.items():
        for match in re.finditer(word, text, re.IGNORECASE):
            yield f"{text[max(match.start() - 30, 0) : match.end() + 20]!r}: say {better!r}"


def terms() -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [row for row in rows if row not in ("term", "---")]


def test_the_glossary_is_alphabetical_and_each_term_has_one_sentence() -> None:
    lowered = [term.lower() for term in terms()]
    assert len(lowered) > 70
    assert lowered == sorted(set(lowered))
    rows = re.findall(r"^\| .+? \| (.+?) \| .*\|$", GLOSSARY.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(terms()) + 1
    for sentence in rows[1:]:
        assert re.fullmatch(r"[A-Z0-9`].+\.", sentence), sentence


def test_the_glossary_has_every_name_of_the_program() -> None:
    text = GLOSSARY.read_text(encoding="utf-8")
    literals = (ActivationDtype, Granularity, BackendName, LayoutName, RoundingChoice, Spending)
    names = {name for literal in (*literals, ScaleChoice) for name in typing.get_args(literal)}
    names |= {family.name for family in FAMILIES} | {*NUMBER_FORMATS} | {*POLICIES}
    assert {*typing.get_args(Verdict), *typing.get_args(EngineVerdict)} <= {*terms()}
    assert {name for name in names if f"`{name}`" not in text and name not in terms()} == set()
