"""`compare`: several drafts on the same prompts; which one for which traffic?"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.command_line import running_argv
from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import ReportFormat, check_reports, write_reports
from ...recipes.decode import MisfitError
from . import reports
from .arguments import AnyPath, share
from .option import Argument, Option
from .pages import asked_for, given
from .references import Reference
from .replay import OnTracesSettings
from .replay_in_groups import replay_in_groups
from .verb import verb

if TYPE_CHECKING:
    from ...validate.comparison.draft_comparison import ComparisonReport
    from ...validate.comparison.sources import Counted
    from ...validate.judging.published import Texts


def shares_by_category(text: str) -> Mapping[str, float]:
    """Shares by category: chat=0.7,code=30%.

    Raises:
        MisfitError: it is none, or names a category twice.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        if not name or not equals or name in found:
            raise MisfitError(
                f"expected CATEGORY=SHARE,..., each once, such as chat=0.7,code=0.3; got {text!r}"
            )
        found[name] = share(number)
    return found


@dataclass(frozen=True, slots=True)
class CompareSettings(OnTracesSettings):
    """Which drafts on which prompts, and what your traffic is like."""

    drafts: Annotated[
        Sequence[Reference],
        Argument(
            "drafts, the baseline first; without --traces, files instead: reports of "
            "'gate --report' with one baseline, output of 'replay --json', or "
            "measurements of 'measure' or of another tool",
            "DRAFT",
        ),
    ]
    traces: Annotated[AnyPath | None, Option("trace folder", "TRACES")] = None
    _: KW_ONLY
    traffic: Annotated[
        Mapping[str, float] | None,
        Option(
            "share of your output tokens by category of prompts, such as chat=0.7,code=0.3"
            " (default: the prompts as they are)",
            "C=SHARE,...",
            count=1,
            reads=shares_by_category,
        ),
    ] = None
    confidence: Annotated[
        float, Option("joint confidence of all intervals (default 0.95)", "SHARE", reads=share)
    ] = 0.95
    html: Annotated[AnyPath | None, Option("write the comparison as an HTML page", "F.html")] = None
    plot: Annotated[AnyPath | None, Option("draw the comparison", "F.svg")] = None
    report: Annotated[AnyPath | None, Option("also write the comparison as JSON", "F.json")] = None
    overwrite: Annotated[bool, Option("replace files that exist already")] = False

    @property
    def files(self) -> dict[ReportFormat, Path]:
        """What is written."""
        return given({"html": self.html, "plot": self.plot, "report": self.report})

    def check(self) -> None:
        """The files can be written, and nothing is asked for that files do not say."""
        from ...validate.errors import CompareError

        check_reports(self.files, overwrite=self.overwrite)
        if self.traces is not None:
            return
        for name in ("num_draft_tokens", "target", "batch_size"):
            if getattr(self, name) is not None:
                raise CompareError(
                    f"--{name.replace('_', '-')}",
                    "is of use for traces only, and none are given",
                    fix="leave it out, or give drafts and --traces T",
                )


@verb(CompareSettings)
def compare(settings: CompareSettings) -> "reports.ComparisonReport":
    """Compare several drafts on the same prompts, to find out which one suits your traffic.

    Returns:
        The acceptance length of every draft, and the relative change between every two drafts, over
        all prompts and in each category. All intervals hold together at the given confidence.

    Raises:
        DraftQuantError: a draft, the traces or a file cannot be read, or they do not have the same
            prompts.
    """
    from ...validate.comparison import draft_comparison
    from ...validate.report.facts import today

    date = today()
    counted = _counted(settings)
    report = draft_comparison.compare(
        counted.drafts,
        num_draft_tokens=counted.num_draft_tokens,
        counted_by=counted.counted_by,
        traffic=settings.traffic,
        confidence=settings.confidence,
        warnings=counted.warnings,
        date=date,
        argv=asked_for(running_argv()),
    )
    texts = _texts(report)
    files = {path: texts[kind]() for kind, path in settings.files.items()}
    write_reports(files, overwrite=settings.overwrite)
    return report.with_texts(texts)


def _counted(settings: CompareSettings) -> "Counted":
    """What is compared; without traces the files say it."""
    from ...validate.comparison.sources import of_files, of_replays
    from ...validate.judging.candidate_origin import DraftFolder
    from .opened_traces import open_with_warnings
    from .position_limits import position_warnings

    if settings.traces is None:
        return of_files([Path(path) for path in settings.drafts])
    traces, warnings = open_with_warnings(settings.traces, settings.listener)
    folders = [resolve_draft(str(draft)).folder for draft in settings.drafts]
    warnings += position_warnings(settings.drafts, traces, settings.listener)
    digests = [DraftFolder.read(folder).sha256 for folder in folders]
    return of_replays(replay_in_groups(settings.drafts, traces, settings), digests, warnings)


def _texts(report: "ComparisonReport") -> "Texts":
    """What makes the files of a comparison."""
    from ...validate.comparison.comparison_page import drawing, page
    from ...validate.comparison.draft_comparison import text_of

    forms: Mapping[ReportFormat, Callable[[ComparisonReport], str]]
    forms = {"html": page, "plot": drawing, "report": text_of}
    return {kind: functools.partial(form, report) for kind, form in forms.items()}
