"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable

import torch


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


def gemm_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a large product, as this machine does it now."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return float(2 * size**3 / seconds_of(lambda: a @ b, device, repeats=5))
