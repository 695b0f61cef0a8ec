"""Devices of this machine: which one a name means, and how much memory it has."""

import resource
import sys
from pathlib import Path

import torch

from ...recipes.errors import DeviceError
from ...recipes.regular_file import read_text

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""For cgroup versions 2 and 1: folder, limit, usage, and the prefix of keys in memory.stat."""


def resolve_device(name: str) -> torch.device:
    """The device that a command line names: cpu, cuda, cuda:I, or auto, the first GPU if any."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (name != "cuda" and not index.isdecimal()):
        raise DeviceError(
            "--device",
            f"expected auto, cpu, cuda or cuda:I, got {name!r}",
            fix="give one of these",
        )
    number = int(index or 0)
    if number >= count:
        what = f"there is no {name}: {_what_there_is(count)}"
        raise DeviceError("--device", what, fix="give one of these, or auto")
    return torch.device("cuda", number)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that are still available on a device; None where there is no /proc/meminfo."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available_of_machine()
    if free is None:
        return None
    lefts = (_left_in_cgroup(*group) for group in _CGROUPS)
    return min([free, *(left for left in lefts if left is not None)])


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on a GPU as torch counts it, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _what_there_is(count: int) -> str:
    if not count:
        built = torch.version.cuda or torch.version.hip
        why = "" if built else ", a build without GPUs,"
        return f"torch {torch.__version__}{why} sees the CPU only"
    names = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    return f"torch sees cpu, {', '.join(names)}"


def _available_of_machine() -> int | None:
    try:
        lines = read_text(_MEMINFO).splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _left_in_cgroup(folder: Path, limit: str, used: str, prefix: str) -> int | None:
    """None where there is no limit. Cached files can be dropped, so they do not count as used."""
    try:
        held = int(read_text(folder / used))
        stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
        cached = sum(int(stat[f"{prefix}{key}_file"]) for key in ("active", "inactive"))
        return max(0, int(read_text(folder / limit)) - held + cached)
    except (OSError, ValueError, KeyError):  # no such group; "max"
        return None
