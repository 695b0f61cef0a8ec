"""The report as JUnit's XML, which every CI shows: a test case for each verdict.

The suite is green exactly where the job is. What the policy leaves open is skipped; and where an
INCONCLUSIVE verdict fails no job, so is every case that is not passed under such a verdict.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from ...recipes.errors import visible
from ..judging.judgement import GateReport
from ..judging.verdict import Verdict
from . import words
from .document import Document

SUITE = "draftquant gate"

Open = Literal["error", "skipped"]
"""What becomes of an INCONCLUSIVE verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One verdict.

    Attributes:
        group, name: of the test case. reason: of the verdict.
        required: it has to pass; one that has not is skipped where it is INCONCLUSIVE.
    """

    group: str
    name: str
    verdict: str
    reason: str
    required: bool = True

    def result(self, whole: Verdict, inconclusive: Open) -> str:
        """The element that says how it went; "" = passed.
        """
        if self.verdict == "PASS":
            return ""
        if whole == "INCONCLUSIVE" and inconclusive == "skipped":
            return "skipped"
        if self.verdict == "FAIL":
            return "failure"
        if not self.required:
            return "skipped"
        return inconclusive if self.verdict == "INCONCLUSIVE" else "error"


def junit(document: Document, *, inconclusive: Open = "error") -> str:
    """The whole file.

    Args:
        document: that was read, or would be.
    """
    cases = list(_cases(document))
    found = [case.result(document.judgement.verdict, inconclusive) for case in cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(found.count("failure")),
        "errors": str(found.count("error")),
        "skipped": str(found.count("skipped")),
    }
    root = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(document):
        ElementTree.SubElement(properties, "property", {"name": name, "value": visible(value)})
    for case, result in zip(cases, found, strict=True):
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
    yield Case(
        group=SUITE,
        name="verdict",
        verdict=judgement.verdict,
        reason=f"{judgement.reason}{action}",
    )
    for title, found in document.comparisons:
        if title:
            yield Case(group=SUITE, name=title, verdict=found.verdict, reason=found.reason)
        yield from _categories(title or "category", found)
    if document.noise is not None:
        noise = document.noise
        yield Case(group=SUITE, name="server noise", verdict=noise.verdict, reason=noise.reason)
    for one in document.findings:
        yield Case(
            group="parity", name=f"{one.check}: {one.what}", verdict=one.verdict, reason=one.reason
        )


def _categories(group: str, found: GateReport) -> Iterator[Case]:
    for own in found.parts.all:
        if own.outcome is None:
            continue
        yield Case(
            group=group,
            name=own.category,
            verdict=own.outcome,
            reason=f"The acceptance length on {own.num_prompts} prompts changed by"
            f" {words.change(own.change)} (bounds {words.bounds(own.change)}, limit"
            f" {words.limit(own.max_relative_drop)}).",
            required=found.policy.every_category_passes,
        )


def _properties(document: Document) -> Iterator[tuple[str, str]]:
    drafts = document.header.drafts
    yield "draftquant", document.header.draftquant
    if document.header.date is not None:
        yield "date", document.header.date
    yield "command", words.command(document.header.argv)
    yield "baseline_sha256", drafts.baseline.sha256 or "not known"
    yield "candidate_sha256", drafts.candidate.sha256 or "not known"
    for title, found in document.comparisons:
        if found.relative_change is not None:
            name = "relative_change" if not title else f"relative_change ({title})"
            yield name, f"{found.relative_change:.6f}"
