"""`repair_draft`: a copy of a folder with its JSON repaired. It appears whole, or not at all.

Every tensor keeps its bytes: safetensors files are copied whole and hashed on both sides.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from ...errors import VerifyError
from ...files.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    PROVENANCE_FILE,
    UNVERIFIED_CONFIG_FILE,
    Checkpoint,
)
from ...files.command_line import recorded_argv
from ...files.digests import tensor_digests
from ...files.hub import DraftSource
from ...files.later_runs import with_repairs
from ...files.package_version import package_version
from ...files.provenance import Provenance, RepairedProvenance, RepairRecord
from ...files.provenance_file import check_seal, read_provenance
from ...files.provenance_sources import SourceFolder
from ...files.publish import Rewrite, publish
from ...files.side_files import check_no_other_weights
from ...files.staging import sync
from ...stored.declarations import declared_scheme, raw_declaration
from ...verify import VerifyReport, verify
from .flat_declaration import understood
from .repair import with_config
from .repair_plan import RepairPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was written.

    Attributes:
        verification: of the new folder against the draft that it was made from; None without one,
            and for a plain draft.
    """

    out: Path
    plan: RepairPlan
    verification: VerifyReport | None


def repair_draft(
    plan: RepairPlan, out: Path, *, source: DraftSource, argv: Sequence[str] = ()
) -> RepairReport:
    """Write a repaired copy of a folder: copy, write the JSON, re-read everything, rename.

    Args:
        plan: from `plan_repairs`, with at least one repair.
        out: folder to create.
        source: where the folder came from, for provenance.
        argv: the command line, for provenance.

    Raises:
        CheckpointError: the folder's draftquant.json was edited, or it holds what must not travel.
        OutputError: `out` exists or cannot be written.
        VerifyError: what was written is not what was planned; nothing is left behind.
    """
    folder, documents = plan.source.folder, {**plan.files, CONFIG_FILE: plan.config}
    side_files = [f for f in plan.source.side_files() if f not in (*plan.files, PROVENANCE_FILE)]
    check_no_other_weights(folder, side_files, travel="along", made="repaired")
    if plan.source.index is not None and INDEX_FILE not in plan.files:
        side_files.append(INDEX_FILE)
    recorded = read_provenance(folder)
    check_seal(folder, recorded)
    repairing = _Repairing(
        out=out,
        folder=folder,
        tensor_bytes=sum((folder / file).stat().st_size for file in plan.source.headers),
        side_files=side_files,
        documents={
            file: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            for file, content in documents.items()
        },
        plan=plan,
        recorded=recorded,
        source=source,
        argv=argv,
    )
    return RepairReport(out=out, plan=plan, verification=publish(repairing).verification)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reread:
    """What was found: the digest of every tensor, and what `RepairReport` says of verification."""

    tensor_digests: Mapping[str, str]
    verification: VerifyReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repairing(Rewrite[_Reread]):
    """One run; attributes as the arguments of `repair_draft`.

    Attributes:
        recorded: draftquant.json of the folder, None where it has none.
    """

    plan: RepairPlan
    recorded: Provenance | None
    source: DraftSource
    argv: Sequence[str]

    @override
    def write_tensors(self, staging: Path) -> None:
        for file in self.plan.source.headers:
            shutil.copyfile(self.folder / file, staging / file)
            sync(staging / file)

    @override
    def verify(self, staging: Path) -> _Reread:
        return _Reread(tensor_digests=_reread(self.plan, staging, self.out))

    @override
    def provenance(self, found: _Reread) -> Provenance | None:
        """What the folder recorded of itself, and its repairs; of another tool's, these alone."""
        repairs = [
            RepairRecord(name=one.name, wrong=one.wrong, written=one.written)
            for one in self.plan.repairs
        ]
        if self.recorded is not None:
            return with_repairs(self.recorded, repairs, argv=self.argv)
        if raw_declaration(self.plan.source) is None:
            return None  # a plain draft gets no record: it may still be quantized, which writes one
        return RepairedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            source=SourceFolder(hub_id=self.source.hub_id, revision=self.source.revision),
            repairs=tuple(repairs),
            tensor_digests=found.tensor_digests,
        )

    @override
    def confirm(self, staging: Path, found: _Reread) -> _Reread:
        plan = self.plan
        declared = raw_declaration(with_config(plan.source, plan.config))
        if plan.against is None or declared is None:  # a plain draft has no codes
            return found
        report = verify(
            staging,
            plan.against.checkpoint.folder,
            foreign=True,
            config_file=UNVERIFIED_CONFIG_FILE,
        )
        _check_codes(plan, report, self.out)
        return replace(found, verification=replace(report, output=str(self.out)))


def _reread(plan: RepairPlan, staging: Path, out: Path) -> dict[str, str]:
    """The digest of every tensor, after all has been held against the source and the plan.

    Raises:
        VerifyError: a tensor or a declaration is not as planned.
    """
    written = Checkpoint.open(staging, config_file=UNVERIFIED_CONFIG_FILE)
    before, after = tensor_digests(plan.source), tensor_digests(written)
    changed = sorted(name for name in before.keys() | after.keys()
                     if before.get(name) != after.get(name))  # fmt: skip
    if changed:
        raise VerifyError(
            out,
            f"{changed[0]} did not arrive as it was ({len(changed)} tensor(s) in all)",
            fix="the folder changed while it was copied: run again",
        )
    if understood(with_config(plan.source, plan.config)) is not None:
        declared_scheme(written)  # strictly: both declarations of ModelOpt, every key, every regex
    return after


def _check_codes(plan: RepairPlan, report: VerifyReport, out: Path) -> None:
    """A pack order that was proven decodes to the source's weights in what was written, too."""
    wrong = [linear.module for linear in report.linears if linear.wrong_codes]
    if wrong and any(repair.name == "pack-order" for repair in plan.repairs):
        raise VerifyError(
            out,
            f"the codes of {wrong[0]} are not those of {report.source}, and nothing is published",
            fix="run again; if it stays, report this with the folder's config.json",
        )
