"""The tensors of an output: what each tensor of a draft becomes, and the loop that writes them.

It knows which bytes are copied and which are written anew; what those are, the writers say.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from .drafts import Row
from .files.checkpoint import PROVENANCE_FILE, Checkpoint
from .files.safetensors_file import SafetensorsFile, open_files
from .files.safetensors_header import StoredTensor
from .files.workers import WORKERS
from .stored.declarations import HF_QUANT_CONFIG

ONLY_OF_CODES = frozenset({PROVENANCE_FILE, HF_QUANT_CONFIG})
"""Side files of a quantized folder that say nothing true about what is made of it."""


class Output(Protocol):
    """What a tensor of a draft becomes, in the output's file of the same name."""

    @property
    def row(self) -> Row:
        """The tensor of the draft."""

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of the output; none where it is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensors:
    """An `Output`; `changed` where it is written anew, else it is copied byte for byte."""

    row: Row
    stored: tuple[StoredTensor, ...]
    changed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of everything that it becomes."""
        return sum(tensor.nbytes for tensor in self.stored)


def copied(row: Row) -> OutputTensors:
    """A tensor that keeps its bytes."""
    return OutputTensors(row=row, stored=(row.tensor.as_stored,), changed=False)


def bytes_of(outputs: Iterable[Output]) -> int:
    """Tensor bytes of an output, headers not counted."""
    return sum(tensor.nbytes for output in outputs for tensor in output.stored)


def files_of(outputs: Iterable[Output]) -> dict[str, str]:
    """Tensor name -> safetensors file."""
    return {tensor.name: output.row.tensor.file for output in outputs for tensor in output.stored}


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads of one core each; at the end torch has as many threads as before.

    What one thread sets is what torch gives every thread that begins later, the caller's too.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def open_outputs(
    stack: ExitStack, source: Checkpoint, folder: Path, outputs: Iterable[Output]
) -> tuple[dict[str, int], dict[str, SafetensorsFile]]:
    """Descriptors of the files of `source`, and the files being written into `folder`; by file."""
    stored: dict[str, list[StoredTensor]] = {}
    for output in outputs:
        if output.stored:
            stored.setdefault(output.row.tensor.file, []).extend(output.stored)
    return open_files(stack, source, folder, dict(sorted(stored.items())))


def write_outputs(
    source: Checkpoint,
    folder: Path,
    outputs: Sequence[OutputTensors],
    write: Callable[[OutputTensors, SafetensorsFile], None],
    *,
    in_threads: bool = False,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> None:
    """Write every safetensors file of an output, synced.

    Args:
        source: the folder that is read.
        folder: staging folder.
        outputs: all of them.
        write: writes what a changed tensor becomes into its file.
        in_threads: several tensors at once, the largest first; else one after the other.
        on_progress: called in this thread with the bytes of each tensor written.

    Raises:
        CheckpointError: a source file shrank.
        OSError: writing failed.
    """
    with ExitStack() as stack:
        inputs, files = open_outputs(stack, source, folder, outputs)

        def write_one(output: OutputTensors) -> int:
            file = output.row.tensor.file
            if output.changed:
                write(output, files[file])
            else:
                files[file].copy(inputs[file], output.row.tensor)
            return output.nbytes

        if in_threads:
            outputs = sorted(outputs, key=lambda o: (-o.nbytes, o.row.tensor.name))
            written = stack.enter_context(workers()).map(write_one, outputs)
        else:
            written = map(write_one, outputs)
        for nbytes in written:
            on_progress(nbytes)
