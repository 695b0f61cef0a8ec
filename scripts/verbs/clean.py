"""`clean`: remove what killed runs left beside outputs, and the cache."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.errors import OutputError
from ...recipes.listener import Heard
from ..frame import reports
from ..frame.console import megabytes, stdout
from ..frame.verb import Command, verb


@dataclass(frozen=True)
class CleanSettings(Heard):
    """Which folder, and for how many hours others may have been silent."""

    folder: str | Path | None = None
    _: KW_ONLY
    cache: bool = False
    older_than: float | None = None

    @override
    def check(self) -> None:
        if self.folder is None and not self.cache:
            raise OutputError(
                "clean", "expected FOLDER or --cache, got neither", fix="clean FOLDER, for example"
            )


@verb(CleanSettings)
def clean(settings: CleanSettings) -> "reports.CleanReport":
    """Remove the unfinished folders that interrupted runs left beside their outputs.

    The cache is listed where it holds anything, and removed where that is asked for.

    Returns:
        What was removed, and what stays, with the reason.

    Raises:
        DraftQuantError: the folder does not exist.
    """
    from ...quantize.files.result_cache import user_cache
    from ...quantize.files.staging import CleanReport, clean_folder

    reports = []
    if settings.folder is not None:
        reports.append(clean_folder(Path(settings.folder), settings.older_than))
    if (cache := user_cache(settings.listener.warning)) is not None:
        reports.append(cache.clean() if settings.cache else cache.listed())
    return CleanReport(
        removed={name: size for report in reports for name, size in report.removed.items()},
        left={name: why for report in reports for name, why in report.left.items()},
    )


def _show(report: "reports.CleanReport", _settings: object) -> None:
    out = stdout()
    for name, nbytes in report.removed.items():
        out.line(f"removed {name} ({nbytes:,} bytes)")
    for name, why in report.left.items():
        out.line(f"left {name}: {why}")
    total = sum(report.removed.values())
    out.line(f"{len(report.removed)} removed, {megabytes(total)}; {len(report.left)} left")


def _mapping(report: "reports.CleanReport", _settings: object) -> dict[str, Any]:
    removed = [{"folder": name, "bytes": nbytes} for name, nbytes in report.removed.items()]
    left = [{"folder": name, "why": why} for name, why in report.left.items()]
    return {"removed": removed, "left": left}


COMMAND = Command(clean, _show, _mapping)
