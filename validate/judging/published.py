"""`Paged`: a report that can be written as the files that the command line writes."""

import dataclasses
import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from typing_extensions import override

from ...quantize.files.report_files import ReportFormat, check_reports, write_reports
from ...recipes.brief import Brief
from ...recipes.errors import GateError

AnyPath = str | Path
Inconclusive = Literal["error", "skipped"]
Texts = Mapping[ReportFormat, Callable[..., str]]
"""What makes the text of each file."""


class Paged(Brief):
    """A report with a page, which a notebook shows."""

    __slots__ = ("_texts",)

    def with_texts(self, texts: Texts) -> Self:
        """The same report, with the texts of its files."""
        report = type(self)(**_fields(self))
        object.__setattr__(report, "_texts", texts)
        return report

    def html(self) -> str:
        """The report as one page of HTML, which loads nothing and runs no script."""
        return self._text("html")()

    def json(self) -> str:
        """The report as JSON, every figure."""
        return self._text("report")()

    @override
    def _repr_html_(self) -> str:
        return framed(self.html()) if hasattr(self, "_texts") else super()._repr_html_()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with its files for another process."""
        return _restored, (type(self), _fields(self), getattr(self, "_texts", None))

    def _text(self, kind: ReportFormat) -> Callable[..., str]:
        if not hasattr(self, "_texts"):
            raise GateError(
                type(self).__name__,
                "has no files of its own, because it is a part of another report",
                fix="take those of the report that the function of draftquant.api returned",
            )
        texts: Texts = self._texts
        return texts[kind]

    def _write(
        self, asked: Mapping[ReportFormat, AnyPath | None], *, overwrite: bool, **given: Any
    ) -> tuple[Path, ...]:
        paths = {kind: Path(path) for kind, path in asked.items() if path is not None}
        texts = {kind: self._text(kind) for kind in paths}
        check_reports(paths, overwrite=overwrite)
        written = {path: texts[kind](**given.get(kind, {})) for kind, path in paths.items()}
        write_reports(written, overwrite=overwrite)
        return tuple(paths.values())


class Published(Paged):
    """A judgement of `gate` with its files: a page, Markdown, test cases, JSON.

    The methods return what `gate --html`, `--markdown`, `--junit` and `--report` write.
    """

    __slots__ = ()

    def markdown(self) -> str:
        """The report as Markdown, for a pull request."""
        return self._text("markdown")()

    def junit(self, *, inconclusive: Inconclusive = "error") -> str:
        """The report as JUnit XML, one test case for each judgement.

        Args:
            inconclusive: how an INCONCLUSIVE verdict counts: "error", or "skipped" so that it fails
                no job.
        """
        return self._text("junit")(inconclusive=inconclusive)

    def write(
        self,
        *,
        html: AnyPath | None = None,
        markdown: AnyPath | None = None,
        junit: AnyPath | None = None,
        json: AnyPath | None = None,
        inconclusive: Inconclusive = "error",
        overwrite: bool = False,
    ) -> tuple[Path, ...]:
        """Write report files: all that are named, or none.

        Args:
            html: the page's file, such as "gate.html".
            markdown: the file for a pull request, such as "gate.md".
            junit: the file with test cases for CI, such as "gate.xml".
            json: the file with every figure, such as "gate.json".
            inconclusive: how an INCONCLUSIVE verdict counts in `junit`: "error" or "skipped".

        Returns:
            The files that were written.

        Raises:
            OutputError: a file exists, has another ending, or cannot be written; then none is.
        """
        asked: dict[ReportFormat, AnyPath | None]
        asked = {"html": html, "markdown": markdown, "junit": junit, "report": json}
        return self._write(asked, overwrite=overwrite, junit={"inconclusive": inconclusive})


def framed(page: str) -> str:
    """A page in a frame, so that a notebook and the page do not change each other's style.

    The frame shows the page's first screen; the rest scrolls.
    """
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="" title="report"'
        ' style="width:100%;height:38rem;border:0"></iframe>'
    )


def _fields(report: Any) -> dict[str, Any]:
    return {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}


def _restored(cls: type[Paged], fields: dict[str, Any], texts: Texts | None) -> Paged:
    page = cls(**fields)
    return page if texts is None else page.with_texts(texts)
