"""The report files of a judgement: checked before any work, written last, all or none."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from ...quantize.files.hub import Reference, folder_of, recorded_argv
from ...quantize.files.report_files import ReportFormat, append_text, write_reports
from ...recipes.errors import CardError, visible
from ...recipes.regular_file import read_text
from ..golden.golden_acceptance import Golden, golden_document
from ..golden.golden_sources import golden_of_measurement, golden_of_report
from ..golden.profile import profile_document, profile_of
from ..judging.candidate_origin import DraftFolder
from ..judging.published import Published, Texts
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..measure.measuring import DraftIdentity
from ..report import CardRequest
from ..report.document import Document, parse_report, read_report
from ..report.html_report import page
from ..report.report_texts import junit, markdown
from .judging_asked import SUMMARY, ReportFiles, ReportRun

NOTHING: Mapping[Path, str] = MappingProxyType({})
_FORMS: Texts = {"html": page, "markdown": markdown, "junit": junit}
_OF_GOLDEN: Mapping[ReportFormat, Callable[[Golden], str]] = {
    "golden": golden_document,
    "profile": lambda golden: profile_document(profile_of(golden)),
}
_SHOWN = ("--json", "--github", "--overwrite", "--debug", "-q", "--quiet", "-v", "--verbose")


def write_pages(
    asked: ReportFiles, document: Document, beside: Mapping[Path, str]
) -> tuple[Path, ...]:
    """Write every requested report file, and those beside; then tell GitHub."""
    of_junit = {"inconclusive": asked.junit_inconclusive}
    files = dict(beside)
    for kind, path in asked.pages.items():
        files[path] = _FORMS[kind](document, **(of_junit if kind == "junit" else {}))
    write_reports(files, overwrite=asked.overwrite)
    if asked.github:
        append_text(Path(os.environ[SUMMARY]), markdown(document) + "\n")
        fails = asked.junit_inconclusive == "error"
        judged = document.judgement
        asked.listener.line(annotation(judged.verdict, judged.reason, inconclusive_fails=fails))
    return tuple(files)


def golden_file(
    asked: ReportFiles, document: Document, measured: Measurement | None = None
) -> Mapping[Path, str]:
    """Golden acceptance of the candidate, and its profile, if requested beside the other files."""
    if not asked.acceptance:
        return NOTHING
    golden = golden_of_report(document) if measured is None else golden_of_measurement(measured)
    return {path: _OF_GOLDEN[kind](golden) for kind, path in asked.acceptance.items()}


def profile_of_card(asked: CardRequest) -> str:
    """The profile of a card's draft: of its first measured server, else of its gate's replay."""
    if asked.measured:
        golden = golden_of_measurement(read_measurement(Path(asked.measured[0])))
    elif asked.gate is not None:
        golden = golden_of_report(read_report(Path(asked.gate)))
    else:
        raise CardError(
            "--profile",
            "follows from what the draft accepts, and neither --gate nor --measured says that",
            fix="add --gate G.json, or --measured R.jsonl",
        )
    return _OF_GOLDEN["profile"](golden)


def texts_of(text: str) -> Texts:
    """What makes the files of a report from the text of its JSON; it can be pickled."""
    made = {kind: functools.partial(_made, text, form) for kind, form in _FORMS.items()}
    return {"report": functools.partial(str, text), **made}


def _made(text: str, form: Callable[..., str], **given: str) -> str:
    return form(parse_report(text, "gate"), **given)


def asked_for(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line as a report keeps it: without paths, and without options of display."""
    return tuple(word for word in recorded_argv(argv) if word not in _SHOWN)


def annotation(verdict: str, reason: str, *, inconclusive_fails: bool) -> str:
    """What GitHub Actions shows beside a run, on whichever stream it is printed."""
    level = "notice" if verdict == "PASS" else "error"
    if verdict == "INCONCLUSIVE" and not inconclusive_fails:
        level = "warning"
    text = visible(reason).replace("%", "%25")
    return f"::{level} title=draftquant gate%3A {verdict}::{text}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WrittenReport(Published):
    """A report of the gate that was read, and the files that were written from it.

    Attributes:
        document: the report.
        written: the files.
    """

    document: Document
    written: tuple[Path, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self.document.brief(), "written": ", ".join(map(str, self.written))}


def written_report(asked: ReportRun) -> WrittenReport:
    """Read a report of the gate, and write the requested files."""
    document = read_report(Path(asked.gate))
    written = write_pages(asked, document, golden_file(asked, document))
    report = WrittenReport(document=document, written=written)
    return report.with_texts(texts_of(read_text(Path(asked.gate))))


def draft_identity(reference: Reference, served_as: str | None = None) -> DraftIdentity:
    """A draft's identity, as the gate knows it, and its server's name for it."""
    folder = DraftFolder.read(folder_of(reference))
    quantization = "of another tool" if folder.quantized else "none"
    if folder.quantized_by is not None:
        quantization = folder.quantized_by.recipe.name
    given = Path(reference)
    return DraftIdentity(
        draft=given.resolve().name if given.is_dir() else str(reference),
        draft_sha256=folder.sha256,
        draft_quantization=quantization,
        quantized=folder.quantized,
        folder=folder.folder,
        served_as=served_as,
    )
