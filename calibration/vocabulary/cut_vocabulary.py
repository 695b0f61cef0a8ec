"""`cut_vocabulary`: a draft in, the same draft with rows for fewer tokens out, verified.

The caller chooses the tokens; `choice` records why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from ...quantize.files import provenance as records
from ...quantize.files.card_text import CARD_FILE, around, is_ours, read_card, split_front
from ...quantize.files.checkpoint import PROVENANCE_FILE, open_weights, pread_exactly
from ...quantize.files.digests import tensor_digest
from ...quantize.files.hub import DraftSource, recorded_argv
from ...quantize.files.provenance_file import check_seal, quantization_of, read_provenance
from ...quantize.files.publish import check_no_other_weights, publish
from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.making.folder_card import renewed_card
from ...quantize.making.rewriting import OutputRewrite
from ...quantize.planning.outputs import OutputTensors
from ...quantize.stored.stored_draft import StoredDraft
from ...quantize.verify import VerifyReport, verify_cut
from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError
from ...recipes.packages import package_version
from .cut_plan import CutPlan, Ids, RowsOf, plan_cut


def cut_card(
    plan: CutPlan, record: records.Provenance | None, choice: records.VocabularyChoice
) -> dict[str, str]:
    """README.md of the cut draft: the source's, beginning with what this draft is."""
    source = plan.source
    card = read_card(source.checkpoint.folder)
    size, vocabulary = len(plan.kept.rows), source.draft.geometry.vocab_size
    summary = f"vocabulary {size:,} of {vocabulary:,}"
    quantized = quantization_of(record)
    if is_ours(card) and quantized is not None:
        recipe = quantized.recipe
        return renewed_card(source, quantized, recipe, plan.bytes_after, vocabulary=summary)
    front, text = split_front(card)[0], "".join(around(card))
    mark = (
        f"# CUT VOCABULARY\n\nThe head of this draft has rows for {size:,} of the {vocabulary:,}"
        f" tokens of its target ({summary}), and proposes no others. They were chosen by"
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
        missing: requested tokens for which the draft had no row.
        head_from: name of the target's tensor that the rows come from; None = the draft's own.
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

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verified": "verified" if self.verification.ok else "WRONG, not as its source",
            "out": self.out,
            "vocabulary": f"{self.size:,} of {self.vocabulary:,}",
            "rows before": f"{self.size_before:,}",
            "size": f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)}",
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
    """Write a draft with rows for only these tokens: write, verify by re-reading, rename.

    The kept rows, d2t and t2d are written, and the number of rows in config.json; every other
    tensor and side file keeps its bytes. `choice` records for provenance why; `target` is the
    folder from whose head the rows come if the draft has none.
    """
    checkpoint = source.checkpoint()
    record = _usable(checkpoint.folder, read_provenance(checkpoint.folder))
    plan = plan_cut(StoredDraft.read(checkpoint), target_ids, target)
    side_files = [file for file in checkpoint.side_files() if file != PROVENANCE_FILE]
    travel, folder = "with the whole vocabulary", checkpoint.folder
    check_no_other_weights(folder, side_files, travel=travel, made="cut")
    cutting = _Cutting(
        out=out,
        folder=folder,
        tensor_bytes=plan.bytes_after,
        side_files=[file for file in side_files if file != CARD_FILE],
        documents=cut_card(plan, record, choice) | plan.documents(plan.config),
        plan=plan,
        source=source,
        choice=choice,
        record=record,
        argv=argv,
        on_progress=on_progress,
    )
    return cutting.report(publish(cutting, on_stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutting(OutputRewrite[VerifyReport]):
    fix = "report this with the draft's config.json"
    plan: CutPlan
    source: DraftSource
    choice: records.VocabularyChoice
    record: _Record | None

    @override
    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        for stored in output.stored:
            content = self.plan.contents[stored.name]
            if isinstance(content, bytes):
                file.write(stored.name, torch.frombuffer(bytearray(content), dtype=torch.uint8))
            else:
                _write_rows(content, self.plan.kept.rows, stored.name, file)

    @override
    def compared(self, staging: Path, **how: Any) -> VerifyReport:
        target = self.plan.tables.checkpoint.folder if self.plan.tables else None
        ids = self.plan.kept.target_ids
        return verify_cut(staging, self.plan.source, target_ids=ids, target=target, **how)

    @override
    def provenance(self, verification: VerifyReport) -> records.CutProvenance:
        plan, record, head_from = self.plan, self.record, None
        if plan.tables is not None:
            head = plan.tables.lm_head
            digest = tensor_digest(plan.tables.checkpoint, head)
            head_from = records.LentHead(tensor=head.name, digest=digest)
        cut = records.VocabularyCut(
            source=records.SourceDraft(
                hub_id=self.source.hub_id,
                revision=self.source.revision,
                family=plan.source.draft.family.name,
                tensor_digests=verification.source_digests,
            ),
            choice=self.choice,
            vocabulary=plan.source.draft.geometry.vocab_size,
            size_before=plan.kept.size_before,
            size=len(plan.kept.rows),
            missing=plan.kept.missing,
            head_from=head_from,
        )
        return records.CutProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            cuts=(*(record.cuts if isinstance(record, records.CutProvenance) else ()), cut),
            tensor_digests=verification.output_digests,
            tensor_bytes=records.TensorBytes(
                before=plan.source.checkpoint.nbytes, after=plan.bytes_after
            ),
            quantized_by=record.quantized_by
            if isinstance(record, records.CutProvenance)
            else record,
        )

    def report(self, verification: VerifyReport) -> VocabularyReport:
        plan = self.plan
        return VocabularyReport(
            out=self.out,
            family=plan.source.draft.family.name,
            vocabulary=plan.source.draft.geometry.vocab_size,
            size_before=plan.kept.size_before,
            size=len(plan.kept.rows),
            missing=plan.kept.missing,
            head_from=plan.tables.lm_head.name if plan.tables else None,
            bytes_before=plan.source.checkpoint.nbytes,
            bytes_after=plan.bytes_after,
            verification=replace(verification, output=str(self.out)),
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
