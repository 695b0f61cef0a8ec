"""`verify`: re-read a quantized draft and compare it with its source."""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import DraftSource, Reference, resolve_draft
from ...recipes.brief import Brief
from ...recipes.errors import CheckpointError
from ...recipes.regular_file import optional_path
from ..frame import arguments
from ..frame.console import print_json, print_table, stdout, table
from ..frame.settings import Option, Settings
from ..frame.verb import verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...quantize.files.provenance import GraftedProvenance
    from ...quantize.verify import Fault, GraftVerification
    from ...quantize.verify.comparison import VerifyReport


@dataclass(frozen=True, slots=True)
class VerifySettings(Settings):
    """Of which folder, and against which source."""

    output: arguments.Quantized
    against: Annotated[
        Reference, Option("the draft that it was made from: BF16, or what was cut", "DRAFT")
    ]
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Brief):
    """What verifying a folder found.

    Attributes:
        comparison: how the folder compares with its source; None of a target's folder.
        graft: the same of a target's folder with a layer in it.
    """

    comparison: "VerifyReport | None"
    graft: "GraftVerification | None" = None

    @property
    def ok(self) -> bool:
        """Every byte is right."""
        return self._found.ok

    @property
    def _found(self) -> "VerifyReport | GraftVerification":
        found = self.comparison or self.graft
        assert found is not None  # one of the two was compared
        return found

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong."""
        return tuple(str(fault) for fault in self._found.faults)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self._found.to_mapping()

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self._found.brief(), "faults": len(self.faults) or None}


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
        CheckpointError: the source is not an unquantized draft, or the folder is not a checkpoint.
        DeclarationError: the folder of another tool declares a quantization that is not supported.
    """
    record = _grafted_record(settings)
    if record is not None:
        return Verification(comparison=None, graft=_compared_graft(settings, record))
    return Verification(comparison=_compared(settings))


def _grafted_record(settings: VerifySettings) -> "GraftedProvenance | None":
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


def _compared_graft(settings: VerifySettings, record: "GraftedProvenance") -> "GraftVerification":
    """A target's folder with a layer in it, against the target, and the layer's own folder."""
    from ...quantize.files.digests import algorithm_of
    from ...quantize.verify import verify_graft

    layer = None
    if settings.layer is not None:
        layer = resolve_draft(str(settings.layer), settings.subtree).checkpoint()
    with settings.listener.bar("verify", None) as bar:
        return verify_graft(
            Path(str(settings.output)),
            Path(str(settings.against)),
            record.layers,
            layer=layer,
            record=record,
            algorithm=algorithm_of(record.digests),
            on_progress=bar.advance,
        )


def _compared(settings: VerifySettings) -> "VerifyReport":
    """The folder against its source."""
    from ...quantize.verify import folder_verification

    source = resolve_draft(str(settings.against), settings.subtree)
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


def _check_declaration(output: DraftSource) -> None:
    """What another tool declares is understood; what else is wrong is a fault of the report.

    Raises:
        DeclarationError: it is not.
    """
    from ...quantize.stored.stored_declaration import declared_scheme

    with suppress(CheckpointError):
        declared_scheme(Checkpoint.open(output.folder))


def _check_sides(output: DraftSource, source: DraftSource) -> None:
    """The two are not swapped, and the source is of the family that was quantized.

    Raises:
        CheckpointError: they are, or it is not.
    """
    from ...quantize.drafts.recognition import refuse_other_kinds
    from ...quantize.files.provenance import CutProvenance, QuantizedProvenance
    from ...quantize.files.provenance_file import read_provenance
    from ...quantize.stored.stored_declaration import looks_quantized
    from ...quantize.stored.stored_draft import StoredDraft

    given = source.checkpoint()
    record = None
    with suppress(CheckpointError):  # one that cannot be read is a fault of the folder
        record = read_provenance(output.folder)
    was_cut = isinstance(record, CutProvenance)
    refuse_other_kinds(given)
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


# ---- `draftquant verify`: re-read a quantized draft and compare it with its source

VERB = verify


def run(options: argparse.Namespace) -> int:
    """Verify, and print what was found; 1 where anything is wrong."""
    found = verify.run(options.settings)
    if options.json:
        print_json(found.to_mapping())
        return 0 if found.ok else 1
    if found.comparison is not None:
        print_verification(found.comparison)
    if found.graft is not None:
        _print_graft(found.graft)
    return 0 if found.ok else 1


def _print_graft(report: "GraftVerification") -> None:
    out = stdout()
    if not report.declared:
        out.line(
            "what the target's tool declares is not understood here: it was not compared, for each"
            " linear, with what was declared before"
        )
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": all {report.target_tensors:,} tensors of the target are unchanged,"
            f" {report.same_file:,} of them in files that both folders have in common (links);"
            f" {report.layer_tensors:,} tensors of {', '.join(report.layers)} are"
            f" {'those of the layer' if report.with_layer else 'as recorded (--layer LAYER)'};"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    _print_faults(report.faults)


def _print_faults(faults: "Sequence[Fault]") -> None:
    out = stdout()
    out.line(("WRONG", "bold red"), f": {len(faults)} fault(s)")
    for fault in faults:
        out.line(f"  {fault}")


def print_verification(report: "VerifyReport") -> None:
    """Print the linears with their errors, then the verdict or every fault."""
    out = stdout()
    # Bounds are for folders of other tools: what a recipe of this package gives is known exactly.
    bounded = any(linear.max_error is not None for linear in report.linears)
    numbers = (*(("error / allowed",) if bounded else ()), "relative L2 error")
    found = table(
        f"Verified: {report.output} against {report.source}, declared"
        f" {report.scheme or 'as not quantized'}",
        "linear",
        *numbers,
        right=numbers,
    )
    for linear in report.linears:
        error = "-" if linear.max_error is None else f"{linear.max_error:.4f}"
        errors = (error,) if bounded else ()
        found.row(linear.module, *errors, f"{linear.relative_l2_error:.4f}")
    if report.linears or report.vocabulary is None:
        print_table(found)
    rules = [linear.found for linear in report.linears if linear.found]
    for rule in dict.fromkeys(rules):
        out.line(f"{rule}: {rules.count(rule)} linear(s)")
    if report.learned_norms:
        most = max(report.learned_norms.values())
        out.line(
            f"{len(report.learned_norms)} norm(s) learned with the quantized values: not equal to"
            f" the source's, but as draftquant.json records them, and no element was changed by a"
            f" factor of more than {most:.4g}"
        )
    if report.dropped:
        names = ", ".join(report.dropped)
        shown = (
            "compared again with the target's, byte for byte"
            if report.dropped_shown
            else "recorded as equal to the target's, not compared again (--target TARGET)"
        )
        out.line(f"{names}: dropped, {shown}")
    if report.head_unshown:
        out.line(
            "lm_head: rows of the target's head, recorded by their digest, not compared again"
            " (--target TARGET)"
        )
    if report.ok and report.vocabulary is not None:
        out.line(
            ("GOOD", "bold green"),
            f": {report.vocabulary}; {report.kept} tensors as the source says ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": {report.kept} tensors equal byte for byte,"
            f" {report.quantized} linears as the recipe demands ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    _print_faults(report.faults)
