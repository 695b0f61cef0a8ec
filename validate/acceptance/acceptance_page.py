"""The acceptance as a page and as Markdown: every step, then the report of the gate."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jinja2 import PackageLoader

from ..report import words
from ..report.html_report import SIGNS, page_values, render
from ..report.markdown_report import code, escaped, markdown
from .acceptance import Acceptance

MARKS = {**SIGNS, "DONE": "✓", "NOT RUN": words.NONE}
FILES = ("acceptance.html", "acceptance.md", "acceptance.json")
"""The report; what is last in its folder says that the others are there too."""


def acceptance_files(found: Acceptance) -> Mapping[Path, str]:
    """Path -> text of every file of the report."""
    texts = (page(found), text(found), json.dumps(found.to_mapping(), indent=2) + "\n")
    return {found.folder / name: one for name, one in zip(FILES, texts, strict=True)}


def page(found: Acceptance) -> str:
    """The whole page; without a report of the gate it ends with the steps."""
    document = found.document
    values = {"signs": SIGNS} if document is None else page_values(document)
    return render(
        "acceptance.html.j2",
        PackageLoader(__package__, ""),
        layout="stopped.html.j2" if document is None else "page.html.j2",
        found=found,
        marks=MARKS,
        **values,
    )


def text(found: Acceptance) -> str:
    """The whole Markdown."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Acceptance) -> Iterator[str]:
    yield f"### {found.verdict}: draftquant accept of {code(found.quantized)}"
    yield ""
    yield escaped(found.reason)
    for way in (found.action or "").splitlines():
        sentence, command = words.way_out(way)
        yield ""
        yield f"**What to do:** {escaped(sentence)}{f' {code(command)}' if command else ''}"
    yield ""
    yield "| step | outcome | what was found |"
    yield "|---|---|---|"
    for step in found.steps:
        said = " ".join((step.said, *step.details))
        yield f"| {escaped(step.name)} | {step.outcome} | {escaped(said)} |"
    if found.figures:
        yield ""
        yield "| figure without a limit | estimate | bounds |"
        yield "|---|---:|---:|"
        for one in found.figures:
            bounds = f"{words.figure(one.lower)} to {words.figure(one.upper)}"
            yield f"| {escaped(one.what)} | {words.figure(one.estimate)} | {bounds} |"
    if found.document is not None:
        yield ""
        yield markdown(found.document).rstrip("\n")
