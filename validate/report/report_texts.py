"""The report as Markdown, to paste into a pull request, and as JUnit's XML, for every CI.

The JUnit suite is green exactly where the job is. What the policy leaves open is skipped; where
an INCONCLUSIVE verdict fails no job, every case that does not pass under that verdict is skipped
too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...quantize.gpus import gpu_name
from ...recipes.errors import visible
from ..judging.judgement import GateReport
from ..judging.policy import Verdict, in_percent
from ..judging.published import Inconclusive
from . import words
from .document import Document

MOST_ROWS = 40
"""Most rows of a table. GitHub takes comments of 65,536 characters."""
_LONGEST = 300  # characters of a name in a table
_PLAIN = re.compile(r"[A-Za-z0-9_./:=+-]([A-Za-z0-9_./:=+ -]*[A-Za-z0-9_./:=+-])?")
_SPECIAL = re.compile(r"[\\`*_\[\]|~$#<>&]|^[-+=]|(?<=^\d)[.)]")
"""Characters with a meaning in Markdown; a numeric reference instead of them has none."""
_LINKING = re.compile(r"(@|&#35;|:(?=//)|\bwww(?=\.))")
"""What GitHub turns into links and mentions, however it is written: @who, #1, https://, www."""
_APART = "\u200b"
"""A zero-width space."""


def markdown(document: Document) -> str:
    """The whole text, in GitHub's Markdown."""
    checks = [
        (escaped(f"{finding.check}: {finding.what}"[:_LONGEST]), words.figure(finding.estimate),
         words.figure(finding.threshold), finding.verdict)
        for finding in document.findings
    ]  # fmt: skip
    if (noise := document.noise) is not None:
        checks.append(("server noise", words.change(noise.change), words.NONE, noise.verdict))
    return plain_text(
        "gate.md.j2",
        {"escaped": escaped, "code": code},
        document=document,
        checks=checks,
        most_rows=MOST_ROWS,
        words=words,
        confidence=in_percent,
        gpu_name=gpu_name,
    )


def plain_text(template: str, filters: Mapping[str, Callable[..., str]], **values: Any) -> str:
    """A text from one of our templates; foreign text passes through one of the filters."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)


def escaped(text: str) -> str:
    """Foreign text as plain text: no markup, no link, no mention, no second line or cell."""
    return _LINKING.sub(rf"\1{_APART}", _referenced(visible(text)))


def code(text: str) -> str:
    """Foreign text as code, whatever it holds, even in a cell of a table."""
    shown = visible(text)[:_LONGEST]
    return f"`{shown}`" if _PLAIN.fullmatch(shown) else f"<code>{_referenced(shown)}</code>"


def _referenced(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", text)


SUITE = "draftquant gate"


@dataclass(frozen=True, slots=True)
class Case:
    """One verdict; if it is not `required` to pass, INCONCLUSIVE makes it skipped."""

    group: str
    name: str
    verdict: str
    reason: str
    required: bool = True

    def result(self, whole: Verdict, inconclusive: Inconclusive) -> str:
        """The element that says how it went; "" = passed."""
        if self.verdict == "PASS":
            return ""
        if whole == "INCONCLUSIVE" and inconclusive == "skipped":
            return "skipped"
        if self.verdict == "FAIL":
            return "failure"
        if not self.required:
            return "skipped"
        return inconclusive if self.verdict == "INCONCLUSIVE" else "error"


def junit(document: Document, *, inconclusive: Inconclusive = "error") -> str:
    """The whole file."""
    cases = list(_cases(document))
    results = [case.result(document.judgement.verdict, inconclusive) for case in cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(results.count("failure")),
        "errors": str(results.count("error")),
        "skipped": str(results.count("skipped")),
    }
    root = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(document):
        ElementTree.SubElement(properties, "property", {"name": name, "value": visible(value)})
    for case, result in zip(cases, results, strict=True):
        names = {"classname": visible(case.group), "name": visible(case.name), "time": "0"}
        element = ElementTree.SubElement(suite, "testcase", names)
        if result:
            message = visible(case.reason)
            kind = {"message": message, "type": case.verdict}
            ElementTree.SubElement(element, result, kind).text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cases(document: Document) -> Iterator[Case]:
    judgement = document.judgement
    action = "".join(f" {way}" for way in (judgement.action or "").splitlines())
    yield Case(SUITE, "verdict", judgement.verdict, f"{judgement.reason}{action}")
    for title, report in document.comparisons:
        if title:
            yield Case(SUITE, title, report.verdict, report.reason)
        yield from _junit_report_categories(title or "category", report)
    if document.noise is not None:
        yield Case(SUITE, "server noise", document.noise.verdict, document.noise.reason)
    for finding in document.findings:
        yield Case("parity", f"{finding.check}: {finding.what}", finding.verdict, finding.reason)


def _junit_report_categories(group: str, report: GateReport) -> Iterator[Case]:
    for part in report.parts.all:
        if part.outcome is None:
            continue
        drop = part.max_relative_drop
        reason = (
            f"The acceptance length on {part.num_prompts} prompts changed by"
            f" {words.change(part.change, drop)} (bounds {words.bounds(part.change, drop)}, limit"
            f" {words.limit(drop)})."
        )
        required = report.policy.every_category_passes
        yield Case(group, part.category, part.outcome, reason, required)


def _properties(document: Document) -> Iterator[tuple[str, str]]:
    drafts = document.header.drafts
    yield "draftquant", document.header.draftquant
    if document.header.date is not None:
        yield "date", document.header.date
    yield "command", words.command(document.header.argv)
    yield "baseline_sha256", drafts.baseline.sha256 or "not known"
    yield "candidate_sha256", drafts.candidate.sha256 or "not known"
    for title, report in document.comparisons:
        if report.relative_change is not None:
            name = "relative_change" if not title else f"relative_change ({title})"
            yield name, f"{report.relative_change:.6f}"
