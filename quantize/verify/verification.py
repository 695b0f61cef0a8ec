"""Verification of any folder: a quantized draft, one that was cut, a target with a layer in it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import CheckpointError
from ...recipes.regular_file import optional_path
from ..asked import Verifying
from ..drafts.recognition import refuse_other_kinds
from ..files.checkpoint import Checkpoint
from ..files.digests import algorithm_of
from ..files.hub import DraftSource, resolve_draft
from ..files.provenance import CutProvenance, GraftedProvenance, QuantizedProvenance
from ..files.provenance_file import read_provenance
from ..stored.stored_declaration import declared_scheme, looks_quantized
from ..stored.stored_draft import StoredDraft
from .comparison import VerifyReport
from .folder_verification import verify
from .graft_verification import GraftVerification, verify_graft


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Brief):
    """What verifying a folder found.

    Attributes:
        comparison: how the folder compares with its source; None of a target's folder.
        graft: the same of a target's folder with a layer in it.
    """

    comparison: VerifyReport | None
    graft: GraftVerification | None = None

    @property
    def ok(self) -> bool:
        """Every byte is right."""
        return self._found.ok

    @property
    def _found(self) -> VerifyReport | GraftVerification:
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


def verify_as_asked(asked: Verifying) -> Verification:
    """Compare a folder with what it was made from; a wrong byte is a fault of what is returned."""
    record = _grafted_record(asked)
    if record is not None:
        return Verification(comparison=None, graft=_compared_graft(asked, record))
    return Verification(comparison=_compared(asked))


def _grafted_record(asked: Verifying) -> GraftedProvenance | None:
    """What a target's folder with a layer in it records; None of every other folder.

    Raises:
        CheckpointError: --layer was given for another one.
    """
    record = None
    folder = Path(str(asked.output))
    with suppress(CheckpointError):  # one that cannot be read is a fault of the folder
        record = read_provenance(folder) if folder.is_dir() else None
    if isinstance(record, GraftedProvenance):
        return record
    if asked.layer is not None:
        raise CheckpointError(
            "--layer",
            f"{asked.output} is no target's folder that `draftquant graft` wrote",
            fix="leave it out",
        )
    return None


def _compared_graft(asked: Verifying, record: GraftedProvenance) -> GraftVerification:
    """A target's folder with a layer in it, against the target, and the layer's own folder."""
    layer = None
    if asked.layer is not None:
        layer = resolve_draft(str(asked.layer), asked.subtree).checkpoint()
    with asked.listener.bar("verify", None) as bar:
        return verify_graft(
            Path(str(asked.output)),
            Path(str(asked.against)),
            record.layers,
            layer=layer,
            record=record,
            algorithm=algorithm_of(record.digests),
            on_progress=bar.advance,
        )


def _compared(asked: Verifying) -> VerifyReport:
    """The folder against its source."""
    source = resolve_draft(str(asked.against), asked.subtree)
    quantized = resolve_draft(str(asked.output))
    _check_sides(quantized, source)
    if asked.foreign:
        _check_declaration(quantized)
    with asked.listener.bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        return verify(
            quantized.folder,
            source.folder,
            show,
            foreign=asked.foreign,
            target=optional_path(asked.target),
            subtree=source.subtree,
        )


def _check_declaration(output: DraftSource) -> None:
    """What another tool declares is understood; what else is wrong is a fault of the report.

    Raises:
        DeclarationError: it is not.
    """
    with suppress(CheckpointError):
        declared_scheme(Checkpoint.open(output.folder))


def _check_sides(output: DraftSource, source: DraftSource) -> None:
    """The two are not swapped, and the source is of the family that was quantized.

    Raises:
        CheckpointError: they are, or it is not.
    """
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
