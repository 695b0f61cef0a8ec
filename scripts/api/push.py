"""`push`: a quantized draft onto the Hub, verified, with its card, private unless told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.errors import CheckpointError, HubError, VerifyError
from ...quantize.files.card import CARD_FILE, front_keys, read_card
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.entries import SIGNATURE_FILE
from ...quantize.files.hub import is_hub_id
from ...quantize.files.hub_upload import Upload, upload, upload_files
from ...quantize.files.signature import differences, read_signature
from ...quantize.verify.owned import unknown_files
from .opening import Reference
from .verify import verify
from .watch import SILENT, Watch

if TYPE_CHECKING:
    from ...quantize.engines import EngineCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What was uploaded, or would be.

    Attributes:
        files: name -> bytes.
        verified: every byte was compared with the source in this run.
        engines: what each known engine does with the folder on each of its GPUs.
        upload: None of a dry run.
    """

    repository: str
    private: bool
    files: Mapping[str, int]
    verified: bool
    engines: "tuple[EngineCheck, ...]"
    upload: Upload | None

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())


def push(
    folder: str | Path,
    repository: str,
    *,
    against: Reference | None = None,
    unverified: bool = False,
    target: str | Path | None = None,
    public: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    watch: Watch = SILENT,
) -> PushReport:
    """Upload a quantized draft: nothing that does not verify, and never over something else.

    The token is the one that huggingface_hub finds: HF_TOKEN, or what `hf auth login` stored. A run
    that was cut short goes on where it was.

    Example:
        >>> import pathlib
        >>> card = dq.card("OUT", base_model="someone/draft", license="mit")
        >>> _ = pathlib.Path("OUT/README.md").write_text(card, encoding="utf-8")
        >>> dq.push("OUT", "me/draft-int4", against="DRAFT", dry_run=True).verified
        True

    Args:
        folder: the quantized draft.
        repository: owner/name, made if there is none.
        against: folder or Hub id of its source; every byte is compared first.
        unverified: there is no source at hand, and it is uploaded all the same: files that drafts
            are known to have, and none besides.
        target: see `verify`.
        public: everybody may see it; must be what a repository that exists already is.
        revision: branch, made if need be; None = main.
        overwrite: replace files of the same name that have other contents, in a new commit.
        dry_run: check everything here, ask the Hub nothing.
        watch: sees how far the run is.

    Raises:
        VerifyError: the folder does not verify, or there is nothing to verify it against.
        HubError: it has no card; no token, right or network; the repository holds something else.
        CheckpointError: the folder holds what cannot be uploaded, or is not what was signed.
    """
    place = Path(folder)
    if not is_hub_id(repository) or "@" in repository:
        raise HubError("REPO", f"expected a Hub id (owner/name), got {repository!r}",
                       fix="for example me/kimi-k2.5-eagle3-int4")  # fmt: skip
    checkpoint = Checkpoint.open(place)
    files = upload_files(place)
    _check_card(place)
    if SIGNATURE_FILE in files:
        _check_signature_is_of_it(place)
    if unverified and against is None:
        _check_known(checkpoint, files)
    _check_verifies(place, against, unverified=unverified, target=target, watch=watch)
    engines = _engines(checkpoint)
    done = None
    if not dry_run:
        watch.note(f"uploading {len(files)} files, {sum(files.values()):,} bytes")
        done = upload(place, repository, private=not public, revision=revision, overwrite=overwrite)
    return PushReport(
        repository=repository,
        private=not public,
        files=files,
        verified=against is not None,
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


def _check_verifies(
    folder: Path,
    against: Reference | None,
    *,
    unverified: bool,
    target: str | Path | None,
    watch: Watch,
) -> None:
    if against is None:
        if unverified:
            watch.warning("uploaded without being verified against its source")
            return
        raise VerifyError(folder, "is not verified: no source is given",
                          fix="add --against SOURCE, or --unverified to do without")  # fmt: skip
    if unverified:
        raise VerifyError("--unverified", "a source is given, which says whether it verifies",
                          fix="leave one of the two out")  # fmt: skip
    report = verify(folder, against, target=target)
    if not report.ok:
        raise VerifyError(
            folder,
            f"does not verify against {against}, and is not uploaded: {len(report.faults)}"
            " fault(s):",
            details=[f"  {fault}" for fault in report.faults[:10]],
            fix="quantize the draft again; 'draftquant verify' shows all faults",
        )


def _engines(checkpoint: Checkpoint) -> "tuple[EngineCheck, ...]":
    from ...quantize.engines.check import check_checkpoint
    from ...quantize.engines.registry import newest_engines
    from ...quantize.stored.declarations import HF_QUANT_CONFIG

    has_side_file = (checkpoint.folder / HF_QUANT_CONFIG).is_file()
    return tuple(
        check_checkpoint(checkpoint, engine=each.name, arch=arch, has_side_file=has_side_file)
        for each in newest_engines()
        for arch in each.archs
    )
