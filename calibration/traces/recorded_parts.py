"""Parts of one recording, joined: the bytes of the folder that one run would have written."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...quantize.files.safetensors_header import read_header
from ..errors import TraceError
from .manifest import TraceEntry
from .target_tables import TargetTables
from .trace_folder import TraceFolder
from .writer import trace_output


def join_parts(
    parts: Sequence[TraceFolder],
    out: Path,
    *,
    tables: TargetTables | None = None,
    table_ids: Collection[int] = (),
) -> TraceFolder:
    """Write one trace folder of parts that were recorded in fixed batches, without tables.

    Traces are written in the order in which their parts were: one run writes them in the order in
    which the prompts of a batch end, one batch after the other.

    Args:
        parts: at least one, in the order of the prompts.
        out: folder to create.
        tables: of the target, to carry; None = none.
        table_ids: tokens whose embedding is carried beside those of the traces.

    Raises:
        TraceError: the parts were recorded of other targets or otherwise, or a trace is damaged.
        OutputError: `out` exists already, or its parent does not.
    """
    head = parts[0].manifest
    for part in parts[1:]:
        if replace(part.manifest, num_tokens=0, prompts=(), shards=()) != replace(
            head, num_tokens=0, prompts=(), shards=()
        ):
            raise TraceError(
                part.folder,
                f"was recorded of another target, or otherwise, than {parts[0].folder}",
                fix="remove its result, and record this part again with the target of the others",
            )
    with trace_output(
        out,
        head.target,
        head.features,
        temperature=head.temperature,
        sampling=head.sampling,
        ignore_eos=head.ignore_eos,
        logprobs=head.logprobs,
        recorded_by=head.recorded_by,
        tables=tables,
        table_ids=table_ids,
        too_long=head.too_long,
        datasets=head.datasets,
    ) as writer:
        first = 0
        for part in parts:
            for place, entry in _as_written(part):
                writer.add(part.load(entry), position=first + place)
            first += len(part)
    return TraceFolder.open(out)


def _as_written(part: TraceFolder) -> Iterator[tuple[int, TraceEntry]]:
    """Its prompts with their places, in the order in which their tensors stand in its files."""
    for shard in part.manifest.shards:
        own = {
            f"{entry.id}.token_ids": (place, entry)
            for place, entry in enumerate(part.manifest.prompts)
            if entry.file == shard.file
        }
        tensors = read_header(part.folder, shard.file).tensors
        yield from (own[tensor.name] for tensor in tensors if tensor.name in own)
