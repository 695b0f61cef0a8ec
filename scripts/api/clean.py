"""`clean`: remove what killed runs left beside outputs, and the cache."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from ...quantize.errors import OutputError
from ...recipes.bounds import AT_LEAST_0
from ...recipes.decode import MisfitError
from ...recipes.errors import short
from . import reports
from .option import Argument, Option
from .settings import Settings
from .verb import verb


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not hours >= 0:
        raise MisfitError(f"expected hours, such as 24, got {short(text)}")
    return hours


@dataclass(frozen=True, slots=True)
class CleanSettings(Settings):
    """Which folder, and how long others may have been away."""

    folder: Annotated[
        str | Path | None, Argument("folder that outputs were written to", "FOLDER")
    ] = None
    _: KW_ONLY
    cache: Annotated[
        bool,
        Option("remove the cache too, in which replays of BF16 drafts are kept between runs"),
    ] = False
    older_than: Annotated[
        float | None,
        Option(
            "also remove what other machines' runs have not touched for this long "
            "(default: only what died on this machine)",
            "HOURS",
            reads=_hours,
            bounds=AT_LEAST_0,
        ),
    ] = None

    def check(self) -> None:
        """Refuse to look nowhere."""
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
    from ...quantize.files.staging_names import CleanReport, clean_folder

    reports = []
    if settings.folder is not None:
        reports.append(clean_folder(Path(settings.folder), settings.older_than))
    if (cache := user_cache(settings.listener.warning)) is not None:
        reports.append(cache.clean() if settings.cache else cache.listed())
    return CleanReport(
        removed={name: size for report in reports for name, size in report.removed.items()},
        left={name: why for report in reports for name, why in report.left.items()},
    )
