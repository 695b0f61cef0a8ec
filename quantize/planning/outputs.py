"""The tensors of an output: what each tensor of a draft becomes, and the loop that writes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...recipes.errors import PASS_TRACES, BackendError
from ...recipes.schema import Recipe
from ..drafts import Draft, Row
from ..drafts.draft_cache import UNIT, CacheScales, cache_sites
from ..files.checkpoint import PROFILE_FILE, PROVENANCE_FILE, Checkpoint
from ..files.safetensors_file import SafetensorsFile, open_files
from ..files.safetensors_header import WORKERS, StoredTensor
from ..layouts import get_layout
from ..stored.layouts import HF_QUANT_CONFIG

ONLY_OF_CODES = frozenset({PROVENANCE_FILE, PROFILE_FILE, HF_QUANT_CONFIG})
"""Side files of a folder that are false for what is made from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a tensor of a draft becomes, in the output file of the same name; dropped: nothing."""

    row: Row
    stored: tuple[StoredTensor, ...]

    @property
    def bytes_after(self) -> int:
        """Bytes of all the tensors that it becomes."""
        return sum(tensor.nbytes for tensor in self.stored)


OutputT = TypeVar("OutputT", bound=Output)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensors(Output):
    """An output that is written anew if `changed`, else copied byte for byte."""

    changed: bool


def copied(row: Row) -> OutputTensors:
    """A tensor that keeps its bytes."""
    return OutputTensors(row=row, stored=(row.tensor.as_stored,), changed=False)


def bytes_of(outputs: Iterable[Output]) -> int:
    """Tensor bytes of an output, without headers."""
    return sum(output.bytes_after for output in outputs)


def files_of(outputs: Iterable[Output]) -> dict[str, str]:
    """Tensor name -> safetensors file."""
    return {tensor.name: output.row.tensor.file for output in outputs for tensor in output.stored}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOutputs(Generic[OutputT]):
    """The files of a run: descriptors that are read, files that are written, and copies."""

    inputs: Mapping[str, int]
    files: Mapping[str, SafetensorsFile]
    copies: Sequence[Future[OutputT]]
    copied: frozenset[str]


@contextmanager
def opened(
    source: Checkpoint, folder: Path, outputs: Iterable[Output], *, kept: Iterable[OutputT]
) -> Iterator[OpenOutputs[OutputT]]:
    """Open the files of an output, and begin to copy what keeps its bytes.

    One thread copies inside the kernel, which lets only one thread at a time write to a file.
    """
    stored: dict[str, list[StoredTensor]] = {}
    for output in outputs:
        if output.stored:
            stored.setdefault(output.row.tensor.file, []).extend(output.stored)
    with ExitStack() as stack:
        inputs, files = open_files(stack, source, folder, dict(sorted(stored.items())))

        def copy(output: OutputT) -> OutputT:
            tensor = output.row.tensor
            files[tensor.file].copy(inputs[tensor.file], tensor)
            return output

        pool = ThreadPoolExecutor(1)
        stack.callback(pool.shutdown, cancel_futures=True)
        ordered = largest_first(kept)
        copies = [pool.submit(copy, output) for output in ordered]
        names = frozenset(output.row.tensor.name for output in ordered)
        yield OpenOutputs(inputs=inputs, files=files, copies=copies, copied=names)
        finish(copies, lambda _output: None)


def largest_first(outputs: Iterable[OutputT]) -> list[OutputT]:
    """The outputs by bytes to read, so that threads finish together."""
    return sorted(outputs, key=lambda each: (-each.row.tensor.nbytes, each.row.tensor.name))


def finish(futures: Iterable[Future[OutputT]], on_done: Callable[[OutputT], None]) -> None:
    """Wait for all; report each in this thread, and raise the first error."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
        for future in done:
            on_done(future.result())


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads of one core each; torch's own number of threads is restored afterwards.

    When the context ends with an error, work that has not begun is dropped.
    """
    import torch

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def cache_outputs(recipe: Recipe, draft: Draft) -> tuple[OutputTensors, ...]:
    """The scales of keys and values of each layer; none where no cache format is declared."""
    if recipe.kv_cache is None:
        return ()
    layout = get_layout(recipe.layout)
    outputs = []
    for site in cache_sites(draft):
        stored = tuple(
            StoredTensor(name=name, dtype="F32", shape=layout.cache_scale_shape)
            for name in site.names(layout.cache_scale_names)
        )
        outputs.append(OutputTensors(row=site.keys, stored=stored, changed=True))
    return tuple(outputs)


def checked_cache_scales(
    recipe: Recipe, draft: Draft, scales: Mapping[int, CacheScales]
) -> dict[str, float]:
    """Scales of the KV cache, which are given exactly where the recipe measures them."""
    cache, where = recipe.kv_cache, f"recipe {recipe.name}"
    if cache is None or not cache.needs_traces:
        if scales:
            scales_text = cache or "none"
            raise BackendError(
                where,
                f"scales of the KV cache are given, but the recipe's are {scales_text}",
                fix="leave them out, or write kv_cache: {dtype: fp8_e4m3, scales: measured}",
            )
        if cache is None:
            return {}
    sites = cache_sites(draft)
    missing = [site.layer for site in sites if site.layer not in scales]
    if cache.needs_traces and missing:
        raise BackendError(
            where,
            f"kv_cache is {cache}, so each layer needs one of its keys and one of its values."
            f" Missing: {', '.join(map(str, missing))}",
            fix=f"{PASS_TRACES}. Or take the scales that need no traces (--kv-cache unit)",
        )
    import numpy as np

    checked: dict[str, float] = {}
    for site in sites:
        each = scales.get(site.layer, UNIT)
        for name, values in zip(site.recorded, (each.k, each.v), strict=True):
            if len(values) != 1 or not 0 < float(np.float32(values[0])) < float("inf"):
                where = f"{where}: {name}"
                raise BackendError(
                    where,
                    f"expected one positive scale of the KV cache, got {list(values)}",
                    fix="measure it again, on traces in which the draft computes finite numbers",
                )
            checked[name] = float(np.float32(values[0]))
    return checked
