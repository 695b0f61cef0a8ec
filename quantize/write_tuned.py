"""`write_tuned`: an unquantized draft with linears that were taught; whole, or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from typing_extensions import override

from ..recipes.seen_prompts import SeenPrompts
from .drafts import Draft, Row
from .errors import BackendError
from .files.card_text import CARD_FILE
from .files.checkpoint import UNVERIFIED_CONFIG_FILE
from .files.command_line import recorded_argv
from .files.how_rounded import LearnedRounding
from .files.hub import DraftSource
from .files.package_version import package_version
from .files.provenance import TensorBytes, TunedProvenance
from .files.provenance_sources import SourceDraft
from .files.publish import Rewrite, check_faults, publish
from .files.retuning import Retuning, marked_card
from .files.row_blocks import DTYPES
from .files.safetensors_file import SafetensorsFile
from .files.side_files import check_no_other_weights, check_not_made, config_and_index
from .outputs import OutputTensors, copied, files_of, write_outputs
from .verify import VerifyReport, verify_tuned


def write_tuned(
    draft: Draft,
    out: Path,
    weight_of: Callable[[str], Tensor],
    *,
    source: DraftSource,
    learned: LearnedRounding,
    retuning: Retuning,
    calibration_prompts: SeenPrompts,
    argv: Sequence[str] = (),
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> VerifyReport:
    """Write the linears that learned, and all else byte for byte: write, verify, rename.

    Args:
        draft: as released.
        out: folder to create.
        weight_of: canonical module name of a linear that learned -> [out_features, in_features] in
            the dtype of the source.
        source: where the draft came from, for provenance.
        learned: how the linears were learned.
        retuning: how the target taught them, and which they are.
        calibration_prompts: that were looked at, for provenance.
        argv: the command line, for provenance.
        on_stage: called with "write" and "verify" when they begin.

    Raises:
        BackendError: a weight that was learned is not of the shape or dtype of the source's.
        DraftQuantError: of the stage that failed; nothing is left behind.
    """
    checkpoint = draft.checkpoint
    side_files = checkpoint.side_files()
    check_no_other_weights(checkpoint.folder, side_files, travel="untuned", made="tuned")
    check_not_made(checkpoint.folder, side_files)
    files = files_of(map(copied, draft.rows))
    tuning = _Tuning(
        out=out,
        folder=checkpoint.folder,
        tensor_bytes=checkpoint.nbytes,
        side_files=tuple(file for file in side_files if file != CARD_FILE),
        documents={CARD_FILE: marked_card(checkpoint.folder, retuning)}
        | config_and_index(checkpoint, checkpoint.config, files, checkpoint.nbytes),
        draft=draft,
        weight_of=weight_of,
        source=source,
        argv=argv,
        learned=learned,
        retuning=retuning,
        calibration_prompts=calibration_prompts,
    )
    return publish(tuning, on_stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuning(Rewrite[VerifyReport]):
    """One run; attributes as the arguments of `write_tuned`."""

    draft: Draft
    weight_of: Callable[[str], Tensor]
    source: DraftSource
    argv: Sequence[str]
    learned: LearnedRounding
    retuning: Retuning
    calibration_prompts: SeenPrompts

    @override
    def write_tensors(self, staging: Path) -> None:
        outputs = [
            OutputTensors(
                row=row,
                stored=(row.tensor.as_stored,),
                changed=row.module in self.retuning.linears,
            )
            for row in self.draft.rows
        ]
        checkpoint = self.draft.checkpoint
        write_outputs(checkpoint, staging, outputs, self._write_linear, in_threads=False)

    def _write_linear(self, output: OutputTensors, file: SafetensorsFile) -> None:
        weight = self.weight_of(output.row.canonical.removesuffix(".weight"))
        file.write(output.row.tensor.name, _checked(output.row, weight))

    @override
    def verify(self, staging: Path) -> VerifyReport:
        found = verify_tuned(
            staging, self.draft, linears=self.retuning.linears, config_file=UNVERIFIED_CONFIG_FILE
        )
        check_faults(self.out, found.faults, fix="report this with the draft's config.json")
        return found

    @override
    def provenance(self, found: VerifyReport) -> TunedProvenance:
        nbytes = self.draft.checkpoint.nbytes
        return TunedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            source=SourceDraft(
                hub_id=self.source.hub_id,
                revision=self.source.revision,
                family=self.draft.family.name,
                tensor_digests=found.source_digests,
            ),
            tensor_digests=found.output_digests,
            tensor_bytes=TensorBytes(before=nbytes, after=nbytes),
            calibration_prompts=self.calibration_prompts.sha256,
            calibration_sketches=self.calibration_prompts.sketches,
            learned=self.learned,
            retuning=self.retuning,
        )


def _checked(row: Row, weight: Tensor) -> Tensor:
    tensor = row.tensor
    if (tuple(weight.shape), weight.dtype) != (tensor.shape, DTYPES[tensor.dtype]):
        raise BackendError(
            tensor.name,
            f"expected a weight {tensor.dtype} {list(tensor.shape)}, learned was"
            f" {weight.dtype} {list(weight.shape)}",
            fix="run the learning again with this draft",
        )
    return weight
