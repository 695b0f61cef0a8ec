"""`graft_layer`: a target's folder with an MTP layer in it; its own shards are linked."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.packages import package_version
from ..engines.contract import EngineCheck
from ..files import provenance as records
from ..files.checkpoint import UNVERIFIED_CONFIG_FILE, open_weights
from ..files.digests import algorithm_of
from ..files.hub import recorded_argv
from ..files.provenance_file import check_recorded, check_seal, read_provenance
from ..files.publish import LinkChoice, LinkedAs, Rewrite, hard_links_work, place, publish
from ..files.safetensors_file import SafetensorsFile
from ..files.safetensors_header import TensorInfo
from ..files.staging import check_output, staging_name
from ..verify import GraftVerification, check_faults, verify_graft
from .graft_plan import GraftPlan

_METADATA = {"format": "pt"}
_MADE = records.QuantizedProvenance | records.TranscodedProvenance | records.DequantizedProvenance


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraftReport(Brief):
    """A target's folder with a layer in it.

    Attributes:
        out: the folder that was written.
        layers: prefixes of the layers that were put in.
        scheme: how the layers' linears are stored; None where none is quantized.
        linked: file of the target -> how it came into the folder.
        rewritten: files of the target that were written again without the replaced tensors.
        written: files that are new.
        replaced: number of the target's tensors in whose place the layer stands.
        left_out: tables of the layer's folder that the target has.
        target_tensors: number of the target's tensors, all unchanged.
        layer_tensors: number of the layer's.
        bytes_written: of tensors.
        checks: what each engine is predicted to do with the layer.
    """

    out: Path
    layers: tuple[str, ...]
    scheme: str | None
    linked: Mapping[str, LinkedAs]
    rewritten: tuple[str, ...]
    written: tuple[str, ...]
    replaced: int
    left_out: tuple[str, ...]
    target_tensors: int
    layer_tensors: int
    bytes_written: int
    checks: tuple[EngineCheck, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        ways = list(self.linked.values())
        return {
            "out": self.out,
            "layers": ", ".join(self.layers),
            "scheme": self.scheme or "not quantized",
            "target": ", ".join(f"{ways.count(way)} by {way}" for way in dict.fromkeys(ways)),
            "written": megabytes(self.bytes_written),
            "engines": ", ".join(f"{check.title}: {check.verdict}" for check in self.checks),
        }


def graft_layer(
    plan: GraftPlan,
    out: Path,
    *,
    link: LinkChoice = "hard",
    argv: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda _count: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> GraftReport:
    """Write the folder: link, write, verify by re-reading, rename. The target is only read.

    `link` says how the target's unchanged files come in; where hard links cannot be made, they are
    copied. `on_stage` is called with "write" and "verify" when they begin, `on_progress` with the
    bytes of each tensor written.
    """
    for folder in (plan.target.folder, plan.source.folder):
        check_output(out, folder)
    made_by = _made_by(plan)
    if link == "hard" and not _can_link(plan, out):
        link = "none"
    copied = plan.linked_bytes if link == "none" else 0
    graft = _Graft(
        out=out,
        folder=plan.target.folder,
        tensor_bytes=plan.written_bytes + copied,
        side_files=plan.side_files,
        documents=plan.documents,
        plan=plan,
        link=link,
        argv=argv,
        made_by=made_by,
        linked={},
        on_progress=on_progress,
    )
    found = publish(graft, on_stage)
    return GraftReport(
        out=out,
        layers=plan.prefixes,
        scheme=plan.layer.scheme,
        linked=graft.linked,
        rewritten=tuple(plan.rewritten),
        written=tuple(plan.shards),
        replaced=len(plan.replaced),
        left_out=plan.left_out,
        target_tensors=found.target_tensors,
        layer_tensors=found.layer_tensors,
        bytes_written=plan.written_bytes + copied,
        checks=plan.checks,
    )


def _made_by(plan: GraftPlan) -> _MADE | None:
    record = read_provenance(plan.source.folder)
    check_seal(plan.source.folder, record)
    if isinstance(record, records.GraftedProvenance):
        return record.quantized_by if record.layers == plan.prefixes else None
    return record if isinstance(record, _MADE) and plan.source.subtree is None else None


def _can_link(plan: GraftPlan, out: Path) -> bool:
    if not plan.linked:
        return True
    first = plan.target.folder / plan.linked[0]
    return hard_links_work(first, out.absolute().parent, f"{staging_name(out.name)}.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graft(Rewrite[GraftVerification]):
    """One run; `made_by` is draftquant.json of the layer's folder, None where it had none."""

    plan: GraftPlan
    link: LinkChoice
    argv: Sequence[str]
    made_by: _MADE | None
    linked: dict[str, LinkedAs]
    on_progress: Callable[[int], None]

    @override
    def write_tensors(self, staging: Path) -> None:
        plan = self.plan
        for file in plan.linked:
            self.linked[file] = place(plan.target.folder / file, staging / file, self.link)
        for file, header in plan.rewritten.items():
            self._write(staging / file, plan.target.folder, header.tensors, header.metadata)
        for file, tensors in plan.shards.items():
            self._write(staging / file, plan.source.folder, tensors, _METADATA)

    def _write(
        self, path: Path, folder: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        stored = [tensor.as_stored for tensor in tensors]
        with ExitStack() as stack:
            out = stack.enter_context(SafetensorsFile(path, stored, metadata, synced=False))
            sources = {
                file: stack.enter_context(open_weights(folder / file))
                for file in sorted({tensor.file for tensor in tensors})
            }
            for tensor in tensors:
                out.copy(sources[tensor.file], tensor)
                self.on_progress(tensor.nbytes)

    @override
    def verify(self, staging: Path) -> GraftVerification:
        plan = self.plan
        found = verify_graft(
            staging,
            plan.target.folder,
            plan.prefixes,
            layer=plan.stored.checkpoint,
            config_file=UNVERIFIED_CONFIG_FILE,
            algorithm=algorithm_of(self.made_by.digests if self.made_by else {}),
        )
        fix = "run again; if it stays, report this"
        check_faults(self.out, plan.source.folder, found.faults, fix=fix)
        if self.made_by is not None:
            check_recorded(plan.source.folder, self.made_by.digests, found.layer_digests)
        return found

    @override
    def provenance(self, found: GraftVerification) -> records.GraftedProvenance:
        plan = self.plan
        return records.GraftedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            layers=plan.prefixes,
            replaced=plan.replaced,
            target=found.header_digests,
            source=records.SourceFolder(hub_id=plan.source.hub_id, revision=plan.source.revision),
            tensor_digests=found.layer_digests,
            quantized_by=self.made_by,
        )
