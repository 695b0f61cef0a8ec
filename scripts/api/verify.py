"""`verify`: re-read a quantized draft and compare it with its source."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.errors import CheckpointError, OutputError
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.files.model_signature import SignatureReport, Signed, sign_folder, verify_signature
from ...recipes.brief import Brief
from . import arguments
from .option import Option
from .references import Reference, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...quantize.files.provenance import GraftedProvenance
    from ...quantize.verify import GraftVerification
    from ...quantize.verify.folder_verification import VerifyReport


@dataclass(frozen=True, slots=True)
class VerifySettings(Settings):
    """Of which folder, against which source, and whose signature."""

    output: arguments.Quantized
    against: Annotated[
        Reference | None, Option("the draft that it was made from: BF16, or what was cut", "DRAFT")
    ] = None
    _: KW_ONLY
    subtree: arguments.Subtree = None
    foreign: Annotated[
        bool,
        Option(
            "another tool made QUANT: no draftquant.json is expected, and other "
            "tools' rounding is accepted"
        ),
    ] = False
    layer: Annotated[
        Reference | None,
        Option(
            "QUANT is a target with an MTP layer in it (graft), --against the target as it was; the"
            " layer is compared with this folder too, or with --subtree with that part of it",
            "LAYER",
        ),
    ] = None
    target: Annotated[
        arguments.AnyPath | None,
        Option(
            "folder of the target; the tables that QUANT shares with it are compared again",
            "TARGET",
        ),
    ] = None
    sign: Annotated[
        arguments.AnyPath | None,
        Option(
            "private key (PEM); if verification succeeds, QUANT is signed in the file model.sig",
            "KEY",
        ),
    ] = None
    verify_signature: Annotated[
        arguments.AnyPath | None,
        Option(
            "public key (PEM); verify that its holder signed QUANT as it is (needs no --against)",
            "KEY",
        ),
    ] = None

    @override
    def check(self) -> None:
        if self.against is None and self.sign:
            raise CheckpointError("--sign", "missing: --against; only what verifies is signed",
                                  fix="add --against DRAFT, its BF16 source")  # fmt: skip
        if self.against is None and not self.verify_signature:
            fix = (
                "draftquant verify ./draft-fp8 --against ./draft; or --verify-signature KEY for who"
                " published it"
            )
            raise CheckpointError("draftquant verify", "missing: --against", fix=fix)
        if self.sign and self.verify_signature:
            raise CheckpointError(
                "--sign",
                "not allowed with argument --verify-signature",
                fix="verify it with the public key after it is signed",
            )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Brief):
    """What verifying a folder found.

    Attributes:
        comparison: how the folder compares with its source; None where no source was given.
        graft: the same of a target's folder with a layer in it.
        signature: who signed the folder; None where no key was given.
        signed: what was signed in this run; None where no key was given, or where a byte is wrong.
    """

    comparison: "VerifyReport | None"
    graft: "GraftVerification | None" = None
    signature: SignatureReport | None = None
    signed: Signed | None = None

    @property
    def ok(self) -> bool:
        """Every byte is right, and so is the signature, as far as they were asked for."""
        return all(each.ok for each in self._found)

    @property
    def _found(self) -> "tuple[VerifyReport | GraftVerification | SignatureReport, ...]":
        asked = (self.comparison, self.graft, self.signature)
        return tuple(each for each in asked if each is not None)

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong."""
        return tuple(str(fault) for each in self._found for fault in each.faults)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        own = {"ok": self.ok}
        found = {"signature": self.signature, "signed": self.signed}
        if (compared := self.comparison or self.graft) is not None:
            own = {**compared.to_mapping(), "ok": self.ok}
        return own | {key: each and dataclasses.asdict(each) for key, each in found.items()}

    @override
    def brief(self) -> Mapping[str, object]:
        if (compared := self.comparison or self.graft) is not None:
            own = dict(compared.brief())
        else:
            own = {"signature": "verified" if self.ok else "WRONG signature"}
        signed = {"signed by us": "yes" if self.signed else None}
        return {**own, **signed, "faults": len(self.faults) or None}


@verb(VerifySettings)
def verify(settings: VerifySettings) -> Verification:
    """Check every byte of a quantized folder against the draft that it was made from.

    Example:
        >>> report = dq.verify("OUT", against="DRAFT")
        >>> report.ok, report.faults
        (True, ())

    Returns:
        What was found. A wrong byte is a fault of the report, not an exception.

    Raises:
        CheckpointError: the source is not an unquantized draft, the folder is not a checkpoint, a
            file is not a key, or the package model-signing is not installed.
        OutputError: the folder to sign is a Hub id, is signed already, or cannot be written.
        DeclarationError: the folder of another tool declares a quantization that is not supported.
    """
    report = grafted = signature = signed = None
    if settings.verify_signature:
        folder = resolve_draft(str(settings.output)).folder
        signature = verify_signature(folder, Path(settings.verify_signature))
    if settings.against is not None:
        record = grafted_record(settings)
        if record is not None:
            grafted = compared_graft(settings, record, settings.against)
        else:
            report = compared(settings, settings.against)
    found = Verification(comparison=report, graft=grafted, signature=signature)
    if settings.sign and settings.against is not None and found.ok:
        signed = _signed(settings.output, Path(settings.sign))
    return dataclasses.replace(found, signed=signed)


def grafted_record(settings: VerifySettings) -> "GraftedProvenance | None":
    """What a target's folder with a layer in it records; None of every other folder.

    Raises:
        CheckpointError: --layer was given for another one.
    """
    from ...quantize.files.provenance import GraftedProvenance
    from ...quantize.files.provenance_file import read_provenance

    record = None
    folder = Path(str(settings.output))
    with suppress(CheckpointError):  # one that cannot be read is a fault of the folder
        record = read_provenance(folder) if folder.is_dir() else None
    if isinstance(record, GraftedProvenance):
        return record
    if settings.layer is not None:
        raise CheckpointError(
            "--layer",
            f"{settings.output} is no target's folder that `draftquant graft` wrote",
            fix="leave it out",
        )
    return None


def compared_graft(
    settings: VerifySettings, record: "GraftedProvenance", against: Reference
) -> "GraftVerification":
    """A target's folder with a layer in it, against the target, and the layer's own folder."""
    from ...quantize.files.digests import algorithm_of
    from ...quantize.verify import verify_graft

    layer = None
    if settings.layer is not None:
        layer = resolve_draft(str(settings.layer), settings.subtree).checkpoint()
    with settings.listener.bar("verify", None) as bar:
        return verify_graft(
            Path(str(settings.output)),
            Path(str(against)),
            record.layers,
            layer=layer,
            record=record,
            algorithm=algorithm_of(record.digests),
            on_progress=bar.advance,
        )


def compared(settings: VerifySettings, against: Reference) -> "VerifyReport":
    """The folder against its source, whatever else is asked."""
    from ...quantize.verify import folder_verification

    source = resolve_draft(str(against), settings.subtree)
    quantized = resolve_draft(str(settings.output))
    _check_sides(quantized, source)
    if settings.foreign:
        _check_declaration(quantized)
    with settings.listener.bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        return folder_verification.verify(
            quantized.folder,
            source.folder,
            show,
            foreign=settings.foreign,
            target=optional_path(settings.target),
            subtree=source.subtree,
        )


def _signed(output: Reference, private_key: Path) -> Signed:
    """Write model.sig into the folder, in the format of OpenSSF model signing."""
    source = resolve_draft(str(output))
    if source.hub_id is not None:
        raise OutputError(output, "is on the Hub, expected a folder to sign",
                          fix="sign the folder, then push it")  # fmt: skip
    return sign_folder(source.folder, private_key)


def _check_declaration(output: DraftSource) -> None:
    """What another tool declares is understood; what else is wrong is a fault of the report.

    Raises:
        DeclarationError: it is not.
    """
    from ...quantize.stored.declarations import declared_scheme

    with suppress(CheckpointError):
        declared_scheme(Checkpoint.open(output.folder))


def _check_sides(output: DraftSource, source: DraftSource) -> None:
    """The two are not swapped, and the source is of the family that was quantized.

    Raises:
        CheckpointError: they are, or it is not.
    """
    from ...quantize.files.provenance import CutProvenance, QuantizedProvenance
    from ...quantize.files.provenance_file import read_provenance
    from ...quantize.stored.looks_quantized import looks_quantized
    from ...quantize.stored.stored_draft import StoredDraft

    given = source.checkpoint()
    record = None
    with suppress(CheckpointError):  # one that cannot be read is a fault of the folder
        record = read_provenance(output.folder)
    was_cut = isinstance(record, CutProvenance)
    if looks_quantized(given) and not was_cut:
        raise CheckpointError(
            source.folder,
            "expected the unquantized draft behind --against, but this one is quantized",
            fix="are the two in the wrong order? Then run draftquant verify"
            f" {source.folder} --against {output.folder}",
        )
    family = StoredDraft.look(given).draft.family.name
    made = record if isinstance(record, QuantizedProvenance | CutProvenance) else None
    if made is not None and made.source.family != family:
        raise CheckpointError(
            source.folder,
            f"is of family {family}: {output.folder} was made from one of {made.source.family}",
            fix="give the draft that it was made from behind --against",
        )
