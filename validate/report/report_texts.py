"""The report as Markdown, which one pastes into a pull request, and as JUnit's XML, for every CI.

The suite of JUnit is green exactly where the job is. What the policy leaves open is skipped; and
where an INCONCLUSIVE verdict fails no job, so is every case that is not passed under such a
verdict.
"""

import re
from collections.abc import Iterator, Sequence
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
    yield from _table(
        ("draft", "tensors sha256", "bytes"),
        [
            (
                f"{role} {code(draft.name)}{f', {draft.vocabulary}' if draft.vocabulary else ''}",
                code(words.digest(draft.sha256)),
                _bytes(draft.num_bytes),
            )
            for role, draft in (("BF16", drafts.baseline), ("quantized", drafts.candidate))
        ],
    )
    yield from _quantized(document)
    yield from _engines(document)
    if judgement.warnings:
        yield ""
        yield "<details><summary>What else you should know</summary>"
        yield ""
        yield from (f"- {escaped(warning)}" for warning in judgement.warnings)
        yield ""
        yield "</details>"
    yield ""
    yield from _footer(document)


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
    if document.noise is not None:
        rows.append(
            (
                "server noise",
                words.change(document.noise.change),
                words.NONE,
                document.noise.verdict,
            )
        )
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
    loading = [one for one in document.header.engines if one.verdict != "REFUSED"]
    refusing = [one for one in document.header.engines if one.verdict == "REFUSED"]
    for engines, folded in ((loading, False), (refusing, True)):
        if not engines:
            continue
        yield ""
        if folded:
            yield f"<details><summary>Engines and GPUs that refuse it: {len(engines)}</summary>"
            yield ""
        yield from _table(
            ("engine", "GPU", "verdict"),
            [
                tuple(
                    map(escaped, (f"{one.engine} {one.version}", gpu_name(one.arch), one.verdict))
                )
                for one in engines
            ],
        )
        if folded:
            yield ""
            yield "</details>"


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


def _bytes(number: int | None) -> str:
    return words.NONE if number is None else words.nbytes(number)


SUITE = "draftquant gate"

Open = Literal["error", "skipped"]
"""What becomes of an INCONCLUSIVE verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    yield Case(
        group=SUITE,
        name="verdict",
        verdict=judgement.verdict,
        reason=f"{judgement.reason}{action}",
    )
    for title, found in document.comparisons:
        if title:
            yield Case(group=SUITE, name=title, verdict=found.verdict, reason=found.reason)
        yield from _junit_report_categories(title or "category", found)
    if document.noise is not None:
        noise = document.noise
        yield Case(group=SUITE, name="server noise", verdict=noise.verdict, reason=noise.reason)
    for one in document.findings:
        yield Case(
            group="parity", name=f"{one.check}: {one.what}", verdict=one.verdict, reason=one.reason
        )


def _junit_report_categories(group: str, found: GateReport) -> Iterator[Case]:
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
