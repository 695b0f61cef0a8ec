"""A copy of a trace folder whose features are stored in another way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from ...quantize.files.staging import check_output
from ...recipes.brief import Brief, megabytes
from ..errors import TraceError
from .manifest import StorageChoice
from .sets import output_like
from .stored_features import storage_of
from .trace_folder import TraceFolder


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreReport(Brief):
    """Traces whose features are stored in another way.

    Attributes:
        traces: the folder that was written, opened.
        nbytes_before: bytes of the shards of the given folder.
        nbytes: bytes of the shards of the written one.
    """

    traces: TraceFolder
    nbytes_before: int
    nbytes: int

    @override
    def brief(self) -> Mapping[str, object]:
        change = f"{megabytes(self.nbytes_before)} -> {megabytes(self.nbytes)}"
        return {**self.traces.brief(), "shards": change}


def store_traces(traces: TraceFolder, out: Path, choice: StorageChoice) -> StoreReport:
    """Write the same traces with their features stored in another way, one prompt at a time.

    Args:
        traces: to copy; they stay as they are.

    Raises:
        TraceError: they are stored so already, their features were rounded before, a trace is
            damaged, or a package that the storage needs is not installed.
        OutputError: `out` exists already, or its parent does not.
    """
    check_output(out, traces.folder)
    spec, storage = traces.manifest.features, storage_of(choice)
    if spec.storage == storage:
        raise TraceError(traces.folder, f"its features are stored as {choice} already",
                         fix="copy the folder, or choose another --feature-storage")  # fmt: skip
    if spec.storage == "fp8-per-token":
        raise TraceError(
            traces.folder,
            "its features were rounded to FP8: what they were before is lost",
            fix=f"record the traces again with --feature-storage {choice}",
        )
    manifest = replace(traces.manifest, features=replace(spec, storage=storage))
    with output_like(out, manifest, [traces]) as writer:
        for place, trace in enumerate(traces):
            writer.add(trace, position=place)
    written = TraceFolder.open(out)
    return StoreReport(
        traces=written, nbytes_before=_shard_bytes(traces), nbytes=_shard_bytes(written)
    )


def _shard_bytes(traces: TraceFolder) -> int:
    return sum(shard.nbytes for shard in traces.manifest.shards)
