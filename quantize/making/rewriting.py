"""Rewriting a stored folder, quantized or not: tensor by tensor, verified."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from ...recipes.errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, UNVERIFIED_CONFIG_FILE, Checkpoint
from ..files.provenance import Provenance
from ..files.provenance_file import check_recorded
from ..files.publish import Rewrite, config_and_index
from ..files.safetensors_file import SafetensorsFile
from ..planning.outputs import (
    ONLY_OF_CODES,
    OutputTensors,
    bytes_of,
    files_of,
    finish,
    largest_first,
    opened,
    workers,
)
from ..stored.stored_declaration import declared_scheme
from ..stored.stored_draft import StoredDraft
from ..verify import Compared, VerifyReport, check_faults


def quantized_source(checkpoint: Checkpoint, verb: str) -> StoredDraft:
    """A folder of codes, opened; CheckpointError where it declares or stores none."""
    where, declared = checkpoint.folder / CONFIG_FILE, declared_scheme(checkpoint)
    if declared is None:
        raise CheckpointError(
            where,
            f"there is nothing to {verb}: it declares no quantization_config",
            fix="give the output folder of `draftquant quantize`, or another quantized draft",
        )
    stored = StoredDraft.read(checkpoint)
    if not stored.modules:
        what = f"there is nothing to {verb}: it declares {declared}, but stores no quantized linear"
        fix = "remove quantization_config from config.json, or quantize the draft again"
        raise CheckpointError(where, what, fix=fix)
    return stored


def side_files_without_codes(checkpoint: Checkpoint) -> list[str]:
    """The side files that stay true for what is made of the folder."""
    return [file for file in checkpoint.side_files() if file not in ONLY_OF_CODES]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """What becomes of every tensor of a stored folder."""

    source: StoredDraft
    outputs: tuple[OutputTensors, ...]

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the output, headers not counted."""
        return bytes_of(self.outputs)

    def documents(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The text of config.json, and of the index where the source has one."""
        files = files_of(self.outputs)
        return config_and_index(self.source.checkpoint, config, files, self.bytes_after)


FoundT = TypeVar("FoundT", bound=Compared | VerifyReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRewrite(Rewrite[FoundT]):
    """Carries out a plan; `record` is draftquant.json of the source, None where it has none."""

    fix: ClassVar[str]
    plan: OutputPlan
    record: Provenance | None
    argv: Sequence[str]
    on_progress: Callable[[int], None]

    @abstractmethod
    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        """Write a changed tensor."""

    @abstractmethod
    def compared(self, staging: Path, **how: Any) -> FoundT:
        """Compare what was written with the source; `how`: its `config_file`."""

    @override
    def write_tensors(self, staging: Path) -> None:
        """Write tensors in several threads, the largest first."""

        def write_one(output: OutputTensors) -> OutputTensors:
            self.write(output, run.files[output.row.tensor.file])
            return output

        source, outputs = self.plan.source.checkpoint, self.plan.outputs
        kept = [output for output in outputs if output.stored and not output.changed]
        changed = largest_first(output for output in outputs if output.changed)
        with opened(source, staging, outputs, kept=kept) as run, workers() as pool:
            futures = [*run.copies, *(pool.submit(write_one, output) for output in changed)]
            finish(futures, lambda output: self.on_progress(output.bytes_after))

    @override
    def verify(self, staging: Path) -> FoundT:
        comparison = self.compared(staging, config_file=UNVERIFIED_CONFIG_FILE)
        check_faults(self.out, self.folder, comparison.faults, fix=self.fix)
        if self.record is not None:
            check_recorded(self.folder, self.record.tensor_digests, comparison.source_digests)
        return comparison
