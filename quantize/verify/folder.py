"""`verify`: a quantized folder against its source, byte by byte, with a decoder of its own.

It shares no code with what wrote the folder and does not import torch, so an error of the writer
cannot hide in a common helper.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..drafts import Draft, read_draft
from ..errors import CheckpointError, VerifyError
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, Checkpoint
from ..files.provenance import DequantizedProvenance, QuantizedProvenance, read_provenance
from ..files.safetensors_header import TensorInfo
from ..lints import config_changes, find_lints
from ..stored.declarations import DeclaredScheme, declared_scheme
from .codes import Compared, companion_faults, compare_kept, compare_linear, hash_tensor
from .excludes import exclude_faults
from .headers import (
    Sorting,
    config_faults,
    fused_faults,
    index_faults,
    metadata_faults,
    provenance_faults,
    side_file_faults,
    sort_tensors,
)
from .report import Fault, LinearFinding, VerifyReport
from .scales import matrix_scale_faults

__all__ = ["Fault", "LinearFinding", "VerifyReport", "verify"]

OnProgress = Callable[[int, int], None]
_WORKERS = 2  # hashing and numpy release the interpreter lock; more would wait for memory


def verify(output: Path, source: Path, on_progress: OnProgress | None = None) -> VerifyReport:
    """Check every byte of a quantized folder against the draft that it was made from.

    Every source tensor must be in the output, either with the same bytes or, for attention and MLP
    linears, as codes and scales stored exactly as the output declares and equal to the nearest
    rounding of the source; nothing else may be in the output. Its config.json is the source's, or
    the source's with what its lints ask for.

    Args:
        output: the quantized folder.
        source: the unquantized draft.
        on_progress: called with (bytes read, bytes to read), from one thread at a time.

    Returns:
        A report with all faults. A truncated or lying file of the output is a fault as well.

    Raises:
        CheckpointError: `source` is not an unquantized draft, or `output` is no checkpoint at all.
    """
    draft = read_draft(Checkpoint.open(source))
    _check_is_checkpoint(output)
    try:
        checkpoint = Checkpoint.open(output)
        scheme = declared_scheme(checkpoint)
        provenance = _made_here(output)
    except (CheckpointError, VerifyError) as exc:
        return _unreadable(output, source, exc)
    return _Verification(draft, checkpoint, scheme, provenance, on_progress).report()


def _check_is_checkpoint(output: Path) -> None:
    has_weights = (output / INDEX_FILE).exists() or any(output.glob("*.safetensors"))
    if not (output / CONFIG_FILE).is_file() or not has_weights:
        raise CheckpointError(output, f"no folder with {CONFIG_FILE} and safetensors files",
                              fix="give the output folder of `draftquant quantize`")  # fmt: skip


def _unreadable(output: Path, source: Path, exc: CheckpointError | VerifyError) -> VerifyReport:
    """Nothing else can be judged in a folder whose headers or declaration cannot be read."""
    return VerifyReport(
        output=str(output),
        source=str(source),
        scheme=None,
        kept=0,
        quantized=0,
        bytes_compared=0,
        linears=(),
        source_sha256={},
        output_sha256={},
        faults=(Fault(where=exc.where, expected="readable headers and declaration", got=exc.what),),
    )


class _Progress:
    """Bytes read so far, over all workers."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.done = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            if self._on_progress is not None:
                self._on_progress(self.done, self._total)


class _Verification:
    """One run: header checks, then all tensors in two threads, then what depends on the hashes."""

    def __init__(
        self,
        draft: Draft,
        output: Checkpoint,
        scheme: DeclaredScheme | None,
        provenance: QuantizedProvenance | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._draft = draft
        self._source = draft.checkpoint
        self._output = output
        self._scheme = scheme
        self._changes = config_changes(find_lints(draft))
        self._sorting = sort_tensors(draft, output, scheme, foreign=provenance is None)
        self._progress = _Progress(draft.checkpoint.nbytes + output.nbytes, on_progress)
        self._provenance = provenance

    def report(self) -> VerifyReport:
        """Run everything."""
        sorting = self._sorting
        compared = self._compare(sorting)
        source_sha256: dict[str, str] = {}
        output_sha256: dict[str, str] = {}
        for one in compared:
            source_sha256 |= one.source_sha256
            output_sha256 |= one.output_sha256
        faults = [*self._header_faults(), *(fault for one in compared for fault in one.faults)]
        faults += self._matrix_scale_faults(compared)
        self._hash_the_rest(source_sha256, output_sha256)
        if self._provenance is not None:
            faults += provenance_faults(self._provenance, source_sha256, output_sha256)
        return VerifyReport(
            output=str(self._output.folder),
            source=str(self._source.folder),
            scheme=str(self._scheme) if self._scheme else None,
            kept=len(sorting.kept),
            quantized=len(sorting.linears),
            bytes_compared=self._progress.done,
            linears=tuple(one.linear for one in compared if one.linear is not None),
            source_sha256=dict(sorted(source_sha256.items())),
            output_sha256=dict(sorted(output_sha256.items())),
            faults=tuple(faults),
        )

    def _header_faults(self) -> list[Fault]:
        sorting, scheme = self._sorting, self._scheme
        excludes = exclude_faults(self._draft, scheme, sorting.quantized) if scheme else []
        return [
            *sorting.faults,
            *excludes,
            *fused_faults(self._draft, self._output, sorting.quantized, sorting.complete),
            *config_faults(self._source, self._output, scheme, self._changes, self._provenance),
            *index_faults(self._output),
            *metadata_faults(self._source, self._output),
            *side_file_faults(self._source, self._output),
        ]

    def _compare(self, sorting: Sorting) -> list[Compared]:
        """All tensors, the largest first so that the workers end together; results by name."""
        jobs: list[tuple[int, str, Callable[[], Compared]]] = []
        for row in sorting.kept:
            job = partial(compare_kept, self._source, self._output, row.tensor, self._progress.add)
            jobs.append((row.tensor.nbytes, row.tensor.name, job))
        if self._scheme is not None:
            for row, parts in sorting.linears:
                linear = partial(self._compare_linear, self._scheme, row.tensor, parts)
                jobs.append((row.tensor.nbytes, row.tensor.name, linear))
        jobs.sort(key=lambda job: (-job[0], job[1]))
        with ThreadPoolExecutor(_WORKERS) as pool:
            results = [(name, pool.submit(job)) for _, name, job in jobs]
            return [future.result() for _, future in sorted(results, key=lambda r: r[0])]

    def _compare_linear(
        self, scheme: DeclaredScheme, tensor: TensorInfo, parts: Mapping[str, TensorInfo]
    ) -> Compared:
        """Codes and scale of one linear, then its small companions."""
        compared = compare_linear(
            self._source,
            self._output,
            tensor,
            scheme,
            absmax_scale=_scale_rule(self._provenance) == "absmax",
            rounded_quotient=self._provenance is None
            and scheme.layout.foreign_quotients_rounded(scheme),
            on_bytes=self._progress.add,
        )
        compared.faults += companion_faults(self._output, tensor, parts)
        for part in parts.values():
            if part.name not in compared.output_sha256:
                compared.output_sha256[part.name] = hash_tensor(self._output, part)
                self._progress.add(part.nbytes)
        return compared

    def _matrix_scale_faults(self, compared: Sequence[Compared]) -> list[Fault]:
        """Scales of whole matrices, of linears that engines fuse together."""
        absmax = {c.linear.module: c.absmax for c in compared if c.linear and c.absmax is not None}
        scheme = self._scheme
        by_absmax = _scale_rule(self._provenance) == "absmax"
        if scheme is None or not scheme.scales_whole_matrix or not by_absmax:
            return []
        fused = [group for group in self._draft.fused_groups() if absmax.keys() >= set(group)]
        alone = absmax.keys() - {module for group in fused for module in group}
        groups = [*fused, *((module,) for module in sorted(alone))]
        return [
            fault
            for group in groups
            for fault in matrix_scale_faults(
                self._output,
                scheme,
                {module: absmax[module] for module in group},
                own_allowed=self._provenance is None,
            )
        ]

    def _hash_the_rest(self, source: dict[str, str], output: dict[str, str]) -> None:
        """Hashes of tensors that a fault kept from being compared."""
        for checkpoint, hashes in ((self._source, source), (self._output, output)):
            for name in checkpoint.tensors.keys() - hashes.keys():
                hashes[name] = hash_tensor(checkpoint, checkpoint.tensors[name])
                self._progress.add(checkpoint.tensors[name].nbytes)


def _made_here(folder: Path) -> QuantizedProvenance | None:
    """What this package recorded when it quantized; None where something else did.

    Raises:
        CheckpointError: draftquant.json is damaged, or that of a dequantized folder.
    """
    recorded = read_provenance(folder)
    if isinstance(recorded, DequantizedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "the folder was dequantized: it holds no codes to verify",
            fix="verify the quantized folder that it was made from",
        )
    return recorded if isinstance(recorded, QuantizedProvenance) else None


def _scale_rule(provenance: QuantizedProvenance | None) -> str:
    """How the recipe chose scales; every tool known to write these layouts uses absmax."""
    return provenance.recipe.algorithm.scale if provenance else "absmax"
