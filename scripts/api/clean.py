"""`clean`: remove what killed runs left beside outputs."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

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

    folder: Annotated[str | Path, Argument("folder that outputs were written to", "FOLDER")]
    _: KW_ONLY
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


@verb(CleanSettings)
def clean(settings: CleanSettings) -> "reports.CleanReport":
    """Remove the unfinished folders that interrupted runs left beside their outputs.

    Returns:
        What was removed, and what stays, with the reason.

    Raises:
        DraftQuantError: the folder does not exist.
    """
    from ...quantize.files.staging_names import clean_folder

    return clean_folder(Path(settings.folder), settings.older_than)
