"""What determines the bits of a result: the machine, its arithmetic, and the code."""

import functools
import hashlib
import re
from pathlib import Path

import torch

from ...recipes.packages import package_version
from ...recipes.regular_file import open_stream

_ROOT = Path(__file__).parents[2]
_COMPUTING = ("recipes", "quantize", "calibration", "validate/counting")
_SOME = 2**16  # bytes of /proc/cpuinfo: the first processor is in them


def computing(device: torch.device) -> dict[str, object]:
    """What determines the bits of a result: arithmetic, and the code of this package."""
    return {
        **arithmetic(device),
        "draftquant": package_version("draftquant"),
        "code": code_sha256(),
    }


def arithmetic(device: torch.device) -> dict[str, object]:
    """What makes another machine round differently: it may sum a product in another order.

    On the CPU the number of threads does so too: with 7,168 columns two threads sum halves.
    """
    if device.type == "cpu":
        name = f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"
        name += f", {torch.get_num_threads()} threads"
    else:
        name = torch.cuda.get_device_name(device)
    precision = torch.get_float32_matmul_precision()
    return {"torch": torch.__version__, "device": name, "float32 products": precision}


def _processor() -> str:
    """The processor's name in Linux; even kernels of one instruction set differ by it."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return "cpu"
    with open_stream(cpuinfo) as stream:
        name = re.search(rb"^model name\s*:(.*)$", stream.read(_SOME), re.MULTILINE)
    return name[1].decode("ascii", "replace").strip() if name else "cpu"


@functools.cache
def code_sha256() -> str:
    """Hash of the modules that proposals may depend on: a checkout changes without a version."""
    digest = hashlib.sha256()
    for house in _COMPUTING:
        for path in sorted((_ROOT / house).rglob("*.py")):
            with open_stream(path) as stream:
                text = stream.read()
            digest.update(f"{path.relative_to(_ROOT)} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()
