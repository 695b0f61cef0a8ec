"""`card`: README.md of a draft, for the Hub."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from typing_extensions import override

from ...quantize.files.card_text import CARD_FILE
from ...quantize.files.report_files import check_reports, write_reports
from ...quantize.files.staging import check_output, replace_text
from ...recipes.errors import OutputError
from ...recipes.regular_file import AnyPath, optional_path
from ...validate.report import CardRequest
from ..frame.console import print_document, stdout
from ..frame.verb import Command, verb


@dataclass(frozen=True)
class CardSettings(CardRequest):
    """Which folder, and what the card should say beyond the folder."""

    folder: AnyPath
    _: KW_ONLY
    out: AnyPath | None = None
    profile: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        if self.overwrite and self.out is self.profile is None:
            raise OutputError("--overwrite", "nothing is written", fix="add --out or --profile")
        if self.profile is not None:
            check_reports({"profile": Path(self.profile)}, overwrite=self.overwrite)


@verb(CardSettings)
def card(settings: CardSettings) -> str:
    """Write the model card of a folder that `quantize` or `vocab` wrote.

    Example:
        >>> text = dq.card("OUT", base_model="someone/draft", license="mit")
        >>> "base_model_relation: quantized" in text
        True

    Returns:
        The text, which `out` gets too; `profile` gets the speculation profile of the draft.

    Raises:
        DraftQuantError: a file of the folder is not the recorded one, the figures belong to another
            draft, or the base model or the licence is missing.
    """
    from ...validate.report.model_card import model_card

    folder, out = Path(settings.folder), optional_path(settings.out)
    if out is not None:
        _check_place(out, folder, overwrite=settings.overwrite)
    text = model_card(folder, settings)
    if settings.profile is not None:
        from ...validate.runs.report_pages import profile_of_card

        profile = {Path(settings.profile): profile_of_card(settings)}
        write_reports(profile, overwrite=settings.overwrite)
    if out is not None:
        replace_text(out, text)
    return text


def _check_place(out: Path, folder: Path, *, overwrite: bool) -> None:
    if not out.exists() or not overwrite:
        check_output(out)
    elif out.is_symlink() or not out.is_file():
        raise OutputError(out, "expected a file to replace", fix="give another name")
    elif out.resolve() != (folder / CARD_FILE).resolve():
        raise OutputError(
            out,
            f"--overwrite replaces the {CARD_FILE} of {folder} alone, whose text by others is kept",
            fix=f"--out {folder / CARD_FILE}, or a new file",
        )


def _show(text: str, settings: CardSettings) -> None:
    if settings.out is not None:
        stdout().line(
            (str(settings.out), "bold"), f": the model card, {len(text.splitlines())} lines"
        )
    else:
        print_document(text)


COMMAND = Command(card, _show, lambda text, settings: {"out": settings.out, "card": text})
