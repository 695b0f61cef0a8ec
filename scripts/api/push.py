"""`push`: a quantized draft onto the Hub, verified, with its card, private unless told."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...quantize.errors import CheckpointError, HubError, VerifyError
from ...quantize.files.card_text import CARD_FILE, front_keys, read_card
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.files_of_folder import SIGNATURE_FILE
from ...quantize.files.hub_id import is_hub_id
from ...quantize.files.hub_upload import Upload, upload, upload_files
from ...quantize.files.model_signature import differences, read_signature
from ...quantize.verify.unowned_files import unknown_files
from ...recipes.brief import Brief, megabytes
from .arguments import AnyPath, QuantizedFolder
from .option import Argument, Option
from .references import Reference, optional_path
from .settings import Settings
from .verb import verb
from .verify import VerifySettings, compared

if TYPE_CHECKING:
    from ...quantize.engines import EngineCheck


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PushReport(Brief):
    """What was uploaded, or what a dry run would upload.

    Attributes:
        repository: the Hub id.
        private: whether only its owner may see it.
        files: name -> bytes.
        verified: every byte was compared with the source in this run.
        engines: what each known engine does with the folder, on each of its GPUs.
        upload: the commit on the Hub; None for a dry run.
        warnings: what the command line prints as warnings.
    """

    repository: str
    private: bool
    files: Mapping[str, int]
    verified: bool
    engines: "tuple[EngineCheck, ...]"
    upload: Upload | None
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "repository": self.repository,
            "state": "uploaded" if self.upload else "a dry run: nothing is uploaded",
            "seen by": "its owner" if self.private else "everybody",
            "files": f"{len(self.files)}, {megabytes(self.nbytes)}",
            "verified": "against its source" if self.verified else "not against a source",
            "warnings": len(self.warnings) or None,
        }


@dataclass(frozen=True, slots=True)
class PushSettings(Settings):
    """Of which folder, to where, and what is checked before."""

    folder: QuantizedFolder
    repository: Annotated[str, Argument("Hub id to upload to (owner/name)", "REPO")]
    _: KW_ONLY
    against: Annotated[
        Reference | None,
        Option("the source draft; the upload is verified against it byte by byte", "DRAFT"),
    ] = None
    unverified: Annotated[bool, Option("upload without verifying against a source")] = False
    target: Annotated[
        AnyPath | None, Option("folder of the target, as in 'verify --target'", "TARGET")
    ] = None
    public: Annotated[bool, Option("make the repository public (default: private)")] = False
    revision: Annotated[
        str | None, Option("branch to upload to, created if missing (default main)", "BRANCH")
    ] = None
    overwrite: Annotated[
        bool,
        Option("replace files that differ, in a new commit"),
    ] = False
    dry_run: Annotated[bool, Option("run all checks and print the files, but upload nothing")] = (
        False
    )


@verb(PushSettings)
def push(settings: PushSettings) -> PushReport:
    """Upload a quantized draft to the Hub, after verifying it. Nothing there is overwritten.

    The token is the one that huggingface_hub finds: the variable HF_TOKEN, or what `hf auth login`
    stored. An interrupted upload continues when the call is repeated.

    Example:
        >>> import pathlib
        >>> card = dq.card("OUT", base_model="someone/draft", license="mit")
        >>> _ = pathlib.Path("OUT/README.md").write_text(card, encoding="utf-8")
        >>> dq.push("OUT", "me/draft-int4", against="DRAFT", dry_run=True).verified
        True

    Returns:
        What was uploaded, or what would be uploaded by a dry run.

    Raises:
        VerifyError: the folder does not verify, or no source was given to verify it against.
        HubError: the folder has no card; there is no token, no permission or no network; or the
            repository holds other files of the same names.
        CheckpointError: the folder holds files that cannot be uploaded, or differs from what was
            signed.
    """
    place, repository, listener = Path(settings.folder), settings.repository, settings.listener
    if not is_hub_id(repository) or "@" in repository:
        raise HubError("REPO", f"expected a Hub id (owner/name), got {repository!r}",
                       fix="for example me/kimi-k2.5-eagle3-int4")  # fmt: skip
    checkpoint = Checkpoint.open(place)
    files = upload_files(place)
    _check_card(place)
    if SIGNATURE_FILE in files:
        _check_signature_is_of_it(place)
    if settings.unverified and settings.against is None:
        _check_known(checkpoint, files)
    _check_verifies(place, settings)
    engines = _engines(checkpoint)
    done = None
    if not settings.dry_run:
        listener.note(f"uploading {len(files)} files, {sum(files.values()):,} bytes")
        done = upload(
            place,
            repository,
            private=not settings.public,
            revision=settings.revision,
            overwrite=settings.overwrite,
        )
    if not any(one.verdict == "LOADS" for one in engines):
        listener.warning("no engine without a plugin is known to load this folder")
    return PushReport(
        repository=repository,
        private=not settings.public,
        files=files,
        verified=settings.against is not None,
        engines=engines,
        upload=done,
    )


def _check_card(folder: Path) -> None:
    """README.md says what this is; that of a source says that it is the source."""
    keys = front_keys(read_card(folder))
    missing = [key for key in ("base_model", "license") if not keys.get(key)]
    if keys.get("base_model_relation") == "quantized" and not missing:
        return
    path = folder / CARD_FILE
    raise HubError(
        path,
        "is no card of a quantized draft for the Hub: expected base_model, license and"
        " base_model_relation: quantized in its front matter",
        fix=f"draftquant card {folder} --out {path} --overwrite (with --gate G.json where you have"
        " one)",
    )


def _check_signature_is_of_it(folder: Path) -> None:
    """What is signed is what is uploaded; whose signature it is, who downloads it asks."""
    found = differences(folder, read_signature(folder))
    if found:
        raise CheckpointError(
            folder / SIGNATURE_FILE,
            f"is the signature of other files, {len(found)} difference(s):",
            details=[f"  {each}" for each in found[:10]],
            fix=f"rm {folder / SIGNATURE_FILE}, and sign again: draftquant verify --sign",
        )


def _check_known(checkpoint: Checkpoint, files: Mapping[str, int]) -> None:
    """Each file belongs to somebody, also where no source says to whom."""
    unknown = unknown_files(checkpoint, files)
    if unknown:
        raise CheckpointError(
            checkpoint.folder,
            f"{len(unknown)} file(s) that no draft is known to have, and that are not uploaded"
            " without a source that has them:",
            details=[f"  {file}" for file in unknown[:10]],
            fix="move them out of the folder, or add --against SOURCE",
        )


def _check_verifies(folder: Path, settings: PushSettings) -> None:
    against = settings.against
    if against is None:
        if settings.unverified:
            settings.listener.warning("uploaded without being verified against its source")
            return
        raise VerifyError(folder, "is not verified: no source is given",
                          fix="add --against SOURCE, or --unverified to do without")  # fmt: skip
    if settings.unverified:
        raise VerifyError("--unverified", "a source is given, which says whether it verifies",
                          fix="leave one of the two out")  # fmt: skip
    target = optional_path(settings.target)
    report = compared(VerifySettings(output=folder, against=against, target=target), against)
    if not report.ok:
        raise VerifyError(
            folder,
            f"does not verify against {against}, and is not uploaded: {len(report.faults)}"
            " fault(s):",
            details=[f"  {fault}" for fault in report.faults[:10]],
            fix="quantize the draft again; 'draftquant verify' shows all faults",
        )


def _engines(checkpoint: Checkpoint) -> "tuple[EngineCheck, ...]":
    from ...quantize.engines.engine_check import check_checkpoint
    from ...quantize.engines.registry import newest_engines
    from ...quantize.stored.declarations import HF_QUANT_CONFIG

    has_side_file = (checkpoint.folder / HF_QUANT_CONFIG).is_file()
    return tuple(
        check_checkpoint(checkpoint, engine=each.name, arch=arch, has_side_file=has_side_file)
        for each in newest_engines()
        for arch in each.archs
    )
