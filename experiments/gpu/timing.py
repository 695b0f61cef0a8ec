"""Seconds of work on a device: CUDA graphs timed by events, or a plain clock on the CPU."""

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 20


def synchronize(device: torch.device) -> None:
    """Wait until everything that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """The median time of a call, by the host's clock, after one that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def kernel_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of a call's kernels: on a GPU without what launching them takes.

    The weights must be larger than the cache of the GPU: it is not cleared between calls.
    """
    if device.type != "cuda":
        return seconds_of(work, device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # what is chosen and allocated at first calls may not be captured
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(REPEATS)
    ]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def gemm_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a large product, as this machine does it now."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return float(2 * size**3 / seconds_of(lambda: a @ b, device, repeats=5))
