"""`write_tuned`: an unquantized draft with linears that were taught; whole, or not at all."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from ..recipes.seen_prompts import SeenPrompts
from .drafts import Draft, Row
from .errors import BackendError
from .files.card import CARD_FILE
from .files.checkpoint import UNVERIFIED_CONFIG_FILE
from .files.command_line import recorded_argv
from .files.hub import DraftSource
from .files.provenance import (
    LearnedRounding,
    SourceDraft,
    TensorBytes,
    TunedProvenance,
    package_version,
)
from .files.publish import check_faults, publish
from .files.retuning import Retuning, marked_card
from .files.row_blocks import DTYPES
from .files.safetensors_file import open_files
from .files.safetensors_header import StoredTensor
from .files.side_files import check_no_other_weights, check_not_made, config_and_index
from .verify.report import VerifyReport
from .verify.tuned import verify_tuned


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
        retuning: likewise; names them.
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

    def verified(staging: Path) -> VerifyReport:
        report = verify_tuned(
            staging, draft, linears=retuning.linears, config_file=UNVERIFIED_CONFIG_FILE
        )
        check_faults(out, report.faults, fix="report this with the draft's config.json")
        return report

    def provenance(report: VerifyReport) -> TunedProvenance:
        """No time stamp and no path, so that equal runs give equal files."""
        return TunedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(argv),
            source=SourceDraft(
                hub_id=source.hub_id,
                revision=source.revision,
                family=draft.family.name,
                tensor_sha256=report.source_sha256,
            ),
            tensor_sha256=report.output_sha256,
            tensor_bytes=TensorBytes(before=checkpoint.nbytes, after=checkpoint.nbytes),
            calibration_prompts=calibration_prompts.sha256,
            calibration_sketches=calibration_prompts.sketches,
            learned=learned,
            retuning=retuning,
        )

    files = {tensor.name: tensor.file for tensor in checkpoint.tensors.values()}
    return publish(
        out,
        checkpoint,
        tensor_bytes=checkpoint.nbytes,
        write_tensors=lambda staging: _write_tensors(draft, staging, retuning, weight_of),
        side_files=tuple(file for file in side_files if file != CARD_FILE),
        documents={CARD_FILE: marked_card(checkpoint.folder, retuning)}
        | config_and_index(checkpoint, checkpoint.config, files, checkpoint.nbytes),
        verify=verified,
        provenance=provenance,
        on_stage=on_stage,
    )


def _write_tensors(
    draft: Draft, staging: Path, retuning: Retuning, weight_of: Callable[[str], Tensor]
) -> None:
    """One tensor after the other, each file in the place of the source's."""
    checkpoint = draft.checkpoint
    stored = {
        file: [
            StoredTensor(name=t.name, dtype=t.dtype, shape=t.shape)
            for t in checkpoint.tensors.values()
            if t.file == file
        ]
        for file in checkpoint.headers
    }
    with ExitStack() as stack:
        inputs, outputs = open_files(stack, checkpoint, staging, stored)
        for row in draft.rows:
            if row.module in retuning.linears:
                weight = _checked(row, weight_of(row.canonical.removesuffix(".weight")))
                outputs[row.tensor.file].write(row.tensor.name, weight)
            else:
                outputs[row.tensor.file].copy(inputs[row.tensor.file], row.tensor)


def _checked(row: Row, weight: Tensor) -> Tensor:
    tensor = row.tensor
    if (tuple(weight.shape), weight.dtype) != (tensor.shape, DTYPES[tensor.dtype]):
        raise BackendError(
            tensor.name,
            f"expected a weight {tensor.dtype} {list(tensor.shape)}, learned was"
            f" {weight.dtype} {list(weight.shape)}",
            fix="learn it of this draft",
        )
    return weight
