"""The report as Markdown, which one pastes into a pull request, and as JUnit's XML, for every CI.

The suite of JUnit is green exactly where the job is. What the policy leaves open is skipped; and
where an INCONCLUSIVE verdict fails no job, so is every case that is not passed under such a
verdict.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from ...quantize.gpus import gpu_name
from ...recipes.errors import visible
from ..judging.judgement import GateReport
from ..judging.policy import Verdict, in_percent
from . import words
from .document import Document

MOST_ROWS = 40
"""Of a table. GitHub takes comments of 65,536 characters."""
_LONGEST = 300  # characters of a name in a table
_PLAIN = re.compile(r"[A-Za-z0-9_./:=+-]([A-Za-z0-9_./:=+ -]*[A-Za-z0-9_./:=+-])?")
_SPECIAL = re.compile(r"[\\`*_\[\]|~$#<>&]|^[-+=]|(?<=^\d)[.)]")
"""What means something in Markdown; a numeric reference in its place never does."""
_LINKING = re.compile(r"(@|&#35;|:(?=//)|\bwww(?=\.))")
"""What GitHub makes links and mentions of, however it is written: @who, #1, https://, www."""
_TOO_FEW = "too few prompts"
_APART = "\u200b"
"""A space without width."""


def markdown(document: Document) -> str:
    """The whole text, as GitHub reads it."""
    return "\n".join(_lines(document)) + "\n"


def escaped(text: str) -> str:
    """Foreign text as plain text: no markup, no link, no mention, no second line or cell."""
    return _LINKING.sub(rf"\1{_APART}", _referenced(visible(text)))


def code(text: str) -> str:
    """Foreign text as code, whatever it holds, also in a cell of a table."""
    shown = visible(text)[:_LONGEST]
    return f"`{shown}`" if _PLAIN.fullmatch(shown) else f"<code>{_referenced(shown)}</code>"


def _referenced(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)


def _lines(document: Document) -> Iterator[str]:
    judgement, drafts = document.judgement, document.header.drafts
    yield f"### {judgement.verdict}: draftquant gate of {code(drafts.candidate.name)}"
    yield ""
    yield escaped(judgement.reason)
    both = map(words.way_out, (judgement.action or "").splitlines())
    ways = [f"{escaped(way)} {code(told)}" if told else escaped(way) for way, told in both]
    if ways:
        yield ""
        yield f"**What to do:** {ways[0]}" if len(ways) == 1 else "**What to do:**"
        yield from (f"- {way}" for way in ways if len(ways) > 1)
    for title, found in document.comparisons:
        yield ""
        if title:
            yield f"#### {title}: {found.verdict}"
            yield ""
        yield from _categories(found)
    yield from _beside(document)
    yield ""
    rows = []
    for role, draft in (("BF16", drafts.baseline), ("quantized", drafts.candidate)):
        name = f"{role} {code(draft.name)}{f', {draft.vocabulary}' if draft.vocabulary else ''}"
        nbytes = words.NONE if draft.num_bytes is None else words.nbytes(draft.num_bytes)
        rows.append((name, code(words.digest(draft.sha256)), nbytes))
    yield from _table(("draft", "tensors sha256", "bytes"), rows)
    yield from _quantized(document)
    yield from _engines(document)
    if judgement.warnings:
        warnings = [f"- {escaped(warning)}" for warning in judgement.warnings]
        yield from _folded("What else you should know", warnings)
    yield ""
    yield from _footer(document)


def _folded(summary: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", f"<details><summary>{summary}</summary>", "")
    yield from lines
    yield from ("", "</details>")


def _categories(found: GateReport) -> Iterator[str]:
    rows = [
        (code(one.name) if one.name else "**all prompts**", *one.cells, one.outcome or _TOO_FEW)
        for one in words.rows(found)
    ]
    at = "" if found.change is None else f" ({in_percent(found.change.confidence)})"
    yield from _table(
        ("category", "prompts", "BF16", "quantized", "change", f"bounds{at}", "limit", "outcome"),
        rows,
    )
    if (together := words.together(found.parts)) is not None:
        yield ""
        yield together


def _beside(document: Document) -> Iterator[str]:
    rows = [
        (
            escaped(f"{one.check}: {one.what}"[:_LONGEST]),
            words.figure(one.estimate),
            words.figure(one.threshold),
            one.verdict,
        )
        for one in document.findings
    ]
    if (noise := document.noise) is not None:
        rows.append(("server noise", words.change(noise.change), words.NONE, noise.verdict))
    if rows:
        yield ""
        yield from _table(("other checks", "figure", "threshold", "verdict"), rows)


def _quantized(document: Document) -> Iterator[str]:
    made = document.header.drafts.candidate.quantized
    if made is None:
        return
    yield ""
    yield (
        f"Recipe {code(made.recipe)}: {escaped('; '.join(made.formats))}; {made.num_quantized}"
        f" tensors quantized, {made.num_kept} kept; {words.nbytes(made.bytes_after)} instead of"
        f" {words.nbytes(made.bytes_before)}."
    )


def _engines(document: Document) -> Iterator[str]:
    rows: dict[bool, list[tuple[str, ...]]] = {False: [], True: []}
    for one in document.header.engines:
        cells = (f"{one.engine} {one.version}", gpu_name(one.arch), one.verdict)
        rows[one.verdict == "REFUSED"].append(tuple(map(escaped, cells)))
    heads = ("engine", "GPU", "verdict")
    if rows[False]:
        yield ""
        yield from _table(heads, rows[False])
    if refusing := rows[True]:
        summary = f"Engines and GPUs that refuse it: {len(refusing)}"
        yield from _folded(summary, _table(heads, refusing))


def _footer(document: Document) -> Iterator[str]:
    _, found = document.comparisons[0]
    when = f" {document.header.date}" if document.header.date else ""
    traces = "" if found.traces is None else f", traces {words.digest(found.traces.sha256)}"
    yield (
        f"<sub>{escaped(found.estimand)}, K = {found.num_draft_tokens}, policy"
        f" {found.policy.name}{traces}; draftquant"
        f" {escaped(document.header.draftquant)}, judged{when} by"
        f" {code(words.command(document.header.argv))}</sub>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows[:MOST_ROWS]:
        yield f"| {' | '.join(row)} |"
    if len(rows) > MOST_ROWS:
        yield ""
        yield f"and {len(rows) - MOST_ROWS} more, in the report."


SUITE = "draftquant gate"

Open = Literal["error", "skipped"]
"""What becomes of an INCONCLUSIVE verdict."""


@dataclass(frozen=True, slots=True)
class Case:
    """One verdict; where it is not `required` to pass, it is skipped if it is INCONCLUSIVE."""

    group: str
    name: str
    verdict: str
    reason: str
    required: bool = True

    def result(self, whole: Verdict, inconclusive: Open) -> str:
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


def junit(document: Document, *, inconclusive: Open = "error") -> str:
    """The whole file."""
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
    yield Case(SUITE, "verdict", judgement.verdict, f"{judgement.reason}{action}")
    for title, found in document.comparisons:
        if title:
            yield Case(SUITE, title, found.verdict, found.reason)
        yield from _junit_report_categories(title or "category", found)
    if document.noise is not None:
        yield Case(SUITE, "server noise", document.noise.verdict, document.noise.reason)
    for one in document.findings:
        yield Case("parity", f"{one.check}: {one.what}", one.verdict, one.reason)


def _junit_report_categories(group: str, found: GateReport) -> Iterator[Case]:
    for own in found.parts.all:
        if own.outcome is None:
            continue
        reason = (
            f"The acceptance length on {own.num_prompts} prompts changed by"
            f" {words.change(own.change)} (bounds {words.bounds(own.change)}, limit"
            f" {words.limit(own.max_relative_drop)})."
        )
        required = found.policy.every_category_passes
        yield Case(group, own.category, own.outcome, reason, required)


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
