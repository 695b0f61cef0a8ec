"""`cut_vocabulary`: a draft in, the same draft with rows for fewer tokens out, verified.

It is told which tokens; `choice` says for the record why these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError
from ...recipes.packages import package_version
from ..files import provenance as records
from ..files.card_text import CARD_FILE, is_ours, read_card, split_front
from ..files.checkpoint import PROVENANCE_FILE, UNVERIFIED_CONFIG_FILE, open_weights, pread_exactly
from ..files.digests import NEWEST, algorithm_of, tensor_digest
from ..files.hub import DraftSource, recorded_argv
from ..files.provenance_file import check_recorded, check_seal, quantization_of, read_provenance
from ..files.publish import Rewrite, check_no_other_weights, config_and_index, publish
from ..files.safetensors_file import SafetensorsFile
from ..making.folder_card import renewed_card
from ..planning.outputs import OutputTensors, files_of, write_outputs
from ..stored.stored_draft import StoredDraft
from ..verify import VerifyReport, check_faults, verify_cut
from .cut_plan import CutPlan, Ids, RowsOf, plan_cut


def cut_card(
    plan: CutPlan, record: records.Provenance | None, choice: records.VocabularyChoice
) -> dict[str, str]:
    """README.md of the cut draft: the source's, saying before all what this is."""
    source = plan.source
    card = read_card(source.checkpoint.folder)
    size, vocabulary = len(plan.kept.rows), source.draft.geometry.vocab_size
    said = f"vocabulary {size:,} of {vocabulary:,}"
    quantized = quantization_of(record)
    if is_ours(card) and quantized is not None:
        recipe = quantized.recipe
        return renewed_card(source, quantized, recipe, plan.bytes_after, vocabulary=said)
    front, text = split_front(card)
    mark = (
        f"# CUT VOCABULARY\n\nThe head of this draft has rows for {size:,} of the {vocabulary:,}"
        f" tokens of its target ({said}), and proposes no others. They were chosen by"
        f" {len(choice.calibration_prompts):,} recorded prompts; draftquant.json says how.\n"
    )
    return {CARD_FILE: front + mark + (f"\n{text}" if text else "")}


_BLOCK_BYTES = 8 << 20
_Record = records.QuantizedProvenance | records.TranscodedProvenance | records.CutProvenance


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VocabularyReport(Brief):
    """A draft whose vocabulary was cut.

    Attributes:
        size_before: rows of the head before. size: rows now.
        missing: tokens that were asked for, but for which the draft had no row.
        head_from: name of the target's tensor whose rows these are; None = the draft's own.
    """

    out: Path
    family: str
    vocabulary: int
    size_before: int
    size: int
    missing: int
    head_from: str | None
    bytes_before: int
    bytes_after: int
    verification: VerifyReport
    warnings: tuple[str, ...] = ()

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verified": "verified" if self.verification.ok else "WRONG, not as its source",
            "out": self.out,
            "vocabulary": f"{self.size:,} of {self.vocabulary:,}",
            "rows before": f"{self.size_before:,}",
            "size": f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)}",
            "warnings": len(self.warnings) or None,
        }


def cut_vocabulary(
    source: DraftSource,
    out: Path,
    *,
    target_ids: Sequence[int],
    choice: records.VocabularyChoice,
    target: Path | None = None,
    argv: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda _count: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> VocabularyReport:
    """Write a draft with rows for these tokens alone: write, verify by re-reading, rename.

    The kept rows, d2t and t2d are written, and the number of rows in config.json; every other
    tensor and side file keeps its bytes. `choice` says for provenance why these; `target` is the
    folder from whose head the rows come if the draft has none. `on_stage` is called with "write"
    and "verify" when they begin, `on_progress` with the bytes of each tensor written.
    """
    checkpoint = source.checkpoint()
    record = _usable(checkpoint.folder, read_provenance(checkpoint.folder))
    plan = plan_cut(StoredDraft.read(checkpoint), target_ids, target)
    side_files = [file for file in checkpoint.side_files() if file != PROVENANCE_FILE]
    travel, folder = "with the whole vocabulary", checkpoint.folder
    check_no_other_weights(folder, side_files, travel=travel, made="cut")
    files = files_of(plan.outputs)
    documents = config_and_index(checkpoint, plan.config, files, plan.bytes_after)
    cutting = _Cutting(
        out=out,
        folder=folder,
        tensor_bytes=plan.bytes_after,
        side_files=[file for file in side_files if file != CARD_FILE],
        documents=cut_card(plan, record, choice) | documents,
        plan=plan,
        source=source,
        choice=choice,
        record=record,
        argv=argv,
        on_progress=on_progress,
    )
    return cutting.report(publish(cutting, on_stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutting(Rewrite[VerifyReport]):
    """One run; `record` is draftquant.json of the source, None where it has none."""

    plan: CutPlan
    source: DraftSource
    choice: records.VocabularyChoice
    record: _Record | None
    argv: Sequence[str]
    on_progress: Callable[[int], None]

    @override
    def write_tensors(self, staging: Path) -> None:
        plan = self.plan
        source = plan.source.checkpoint
        write_outputs(source, staging, plan.outputs, self._write, on_progress=self.on_progress)

    def _write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        for stored in output.stored:
            content = self.plan.contents[stored.name]
            if isinstance(content, bytes):
                file.write(stored.name, torch.frombuffer(bytearray(content), dtype=torch.uint8))
            else:
                _write_rows(content, self.plan.kept.rows, stored.name, file)

    @override
    def verify(self, staging: Path) -> VerifyReport:
        plan, tables = self.plan, self.plan.tables
        found = verify_cut(
            staging,
            plan.source,
            target_ids=plan.kept.target_ids,
            target=tables.checkpoint.folder if tables else None,
            config_file=UNVERIFIED_CONFIG_FILE,
            algorithm=algorithm_of(self.record.digests if self.record else {}),
        )
        fix = "report this with the draft's config.json"
        check_faults(self.out, self.folder, found.faults, fix=fix)
        if self.record is not None:
            check_recorded(self.folder, self.record.digests, found.source_digests)
        return found

    @override
    def provenance(self, found: VerifyReport) -> records.CutProvenance:
        plan, record = self.plan, self.record
        cut = records.VocabularyCut(
            source=records.SourceDraft(
                hub_id=self.source.hub_id,
                revision=self.source.revision,
                family=plan.source.draft.family.name,
                tensor_digests=found.source_digests,
            ),
            choice=self.choice,
            vocabulary=plan.source.draft.geometry.vocab_size,
            size_before=plan.kept.size_before,
            size=len(plan.kept.rows),
            missing=plan.kept.missing,
            head_from=_target_head(plan),
        )
        return records.CutProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            cuts=(*(record.cuts if isinstance(record, records.CutProvenance) else ()), cut),
            tensor_digests=found.output_digests,
            tensor_bytes=records.TensorBytes(
                before=plan.source.checkpoint.nbytes, after=plan.bytes_after
            ),
            quantized_by=record.quantized_by
            if isinstance(record, records.CutProvenance)
            else record,
        )

    def report(self, found: VerifyReport) -> VocabularyReport:
        """What was written, of what verification found."""
        plan = self.plan
        size, missing = len(plan.kept.rows), plan.kept.missing
        lacking = (
            f"{missing:,} of the {size + missing:,} chosen tokens have no row in this draft, whose"
            f" vocabulary was cut before, and no row can be made of nothing: {size:,} rows are"
            " kept. Cut the draft that has the whole vocabulary, if there is one"
        )
        return VocabularyReport(
            out=self.out,
            family=plan.source.draft.family.name,
            vocabulary=plan.source.draft.geometry.vocab_size,
            size_before=plan.kept.size_before,
            size=size,
            missing=missing,
            head_from=plan.tables.lm_head.name if plan.tables else None,
            bytes_before=plan.source.checkpoint.nbytes,
            bytes_after=plan.bytes_after,
            verification=replace(found, output=str(self.out)),
            warnings=(lacking,) if missing else (),
        )


def _usable(folder: Path, record: records.Provenance | None) -> _Record | None:
    check_seal(folder, record)
    if record is None or isinstance(record, _Record):
        return record
    raise CheckpointError(
        folder / PROVENANCE_FILE,
        "the folder was dequantized, and its vocabulary cannot be cut any more",
        fix="cut the draft that it was made of, then make it again",
    )


def _target_head(plan: CutPlan) -> records.TargetHead | None:
    if plan.tables is None:
        return None
    head = plan.tables.lm_head
    digest = tensor_digest(plan.tables.checkpoint, head, NEWEST)
    return records.TargetHead(tensor=head.name, digest=digest)


def _write_rows(content: RowsOf, rows: Ids, name: str, file: SafetensorsFile) -> None:
    """Rows of a tensor, gathered a block at a time; neighbours are read together."""
    tensor, path = content.tensor, content.checkpoint.folder / content.tensor.file
    width = tensor.nbytes // tensor.shape[0]
    step = max(1, _BLOCK_BYTES // max(1, width))
    buffer = torch.empty(min(step, len(rows)) * width, dtype=torch.uint8)
    view, offset = buffer.numpy().data, 0
    with open_weights(path) as descriptor:
        for first in range(0, len(rows), step):
            block, done = rows[first : first + step], 0
            for run in np.split(block, np.flatnonzero(np.diff(block) != 1) + 1):
                part = view[done : done + len(run) * width]
                pread_exactly(descriptor, part, tensor.start + int(run[0]) * width, path)
                done += len(part)
            offset += file.write(name, buffer[:done], offset=offset)
