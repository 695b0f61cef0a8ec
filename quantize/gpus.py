"""GPUs by the names that people say: their architecture, memory bandwidth and dense peaks.

The one table of GPUs: engines are asked by architecture, estimates count with bandwidth and peaks.
Sources: AMD ROCm and NVIDIA CUDA tables of GPUs for architectures, data sheets for figures.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..recipes.errors import CheckpointError, EstimateError
from ..recipes.formats import NumberFormat, Precision

_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_NVIDIA, _CENTER = (
    "https://resources.nvidia.com/en-us-",
    "https://www.nvidia.com/en-us/data-center/",
)
_AMD = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/"
_BRIEFS = _AMD + "product-briefs/amd-instinct-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a kind.

    Attributes:
        arch: the architecture that engines ask for, such as "gfx942" or "sm90".
        bandwidth: of its memory, in bytes per second.
        peaks: dense FLOP per second by precision, without structured sparsity; weights of others
            are widened and multiplied as bf16.
        source: the document that says so.
    """

    name: str
    arch: str
    bandwidth: float
    peaks: Mapping[Precision, float]
    source: str

    @property
    def widens_fp4(self) -> bool:
        """Kernels widen FP4 weights as they read them (vLLM 0.33: Marlin, on CUDA).

        Else such a format is emulated: its weights are written out in 16 bits and read again
        (`EmulationNvFp4LinearKernel`, `EmulationMxfp4LinearKernel`, on ROCm).
        """
        return not self.arch.startswith("gfx")

    def computes_in(self, precision: Precision) -> Precision:
        """The precision itself where the GPU has a unit for it, else bf16."""
        return precision if precision in self.peaks else "bf16"

    def emulates(self, number: NumberFormat) -> bool:
        """Whether weights in it are written out in 16 bits and read again at each use."""
        return number.is_fp4 and number.unit not in self.peaks and not self.widens_fp4


_Peaks = Mapping[Precision, float]
_CDNA3: _Peaks = {"bf16": 1307.4e12, "fp8": 2614.9e12}
_CDNA4: _Peaks = {"bf16": 2309.6e12, "fp8": 4614e12, "mxfp4": 9227e12}
_CDNA4_AT_2_4_GHZ: _Peaks = {"bf16": 2516.6e12, "fp8": 5033.2e12, "mxfp4": 10066e12}
_ADA: _Peaks = {"bf16": 362.05e12, "fp8": 733e12}
_HOPPER: _Peaks = {"bf16": 989.5e12, "fp8": 1979e12}


def _blackwell(bf16: float, fp4: float) -> _Peaks:
    return {"bf16": bf16, "fp8": 2 * bf16, "nvfp4": fp4, "mxfp4": fp4}


# Name, architecture, bandwidth, dense peaks, source. NVIDIA prints peaks with sparsity (but for
# A100), which are halved here; AMD prints both.
_ROWS: Sequence[tuple[str, str, float, _Peaks, str]] = (
    ("mi300x", "gfx942", 5.3e12, _CDNA3, _AMD + "data-sheets/amd-instinct-mi300x-data-sheet.pdf"),
    ("mi325x", "gfx942", 6e12, _CDNA3, _AMD + "product-briefs/instinct-mi325x-datasheet.pdf"),
    # FP8 is OCP's: 256 compute units x 8,192 and 16,384 FLOP x 2.2 GHz.
    ("mi350x", "gfx950", 8e12, _CDNA4, _BRIEFS + "mi350x-gpu-brochure.pdf"),
    ("mi355x", "gfx950", 8e12, _CDNA4_AT_2_4_GHZ, _BRIEFS + "mi355x-gpu-brochure.pdf"),
    ("a100", "sm80", 2.039e12, {"bf16": 312e12}, _A100),  # 80 GB SXM
    ("l40s", "sm89", 0.864e12, _ADA, _CENTER + "l40s/"),  # PCIe, GDDR6
    (
        "h100",
        "sm90",
        3.35e12,
        _HOPPER,
        _NVIDIA + "gpu-resources/h100-datasheet-24306",
    ),  # 80 GB SXM5
    ("h200", "sm90", 4.8e12, _HOPPER, _NVIDIA + "gpu-resources/hpc-datasheet-sc23"),  # 141 GB SXM
    ("gh200", "sm90", 4e12, _HOPPER, _NVIDIA + "grace-cpu/grace-hopper-superchip"),  # 96 GB HBM3
    # HGX, 1000 W; 4.5, 9 and 18 PFLOPS with sparsity.
    ("b200", "sm100", 8e12, _blackwell(2250e12, 9000e12), _NVIDIA + "blackwell-architecture"),
    # One of 72 in GB200 NVL72, 1200 W; 5, 10 and 20 PFLOPS with sparsity.
    ("gb200", "sm100", 8e12, _blackwell(2500e12, 10000e12), _NVIDIA + "blackwell-architecture"),
    # Blackwell Ultra, one of eight in HGX B300: 36, 72 PFLOPS with sparsity, 105 dense in FP4.
    ("b300", "sm103", 8e12, _blackwell(2250e12, 13125e12), _CENTER + "hgx/"),
    # One of 72 in GB300 NVL72: 360 and 720 PFLOPS with sparsity, 1,080 dense in FP4, 576 TB/s.
    ("gb300", "sm103", 8e12, _blackwell(2500e12, 15000e12), _CENTER + "gb300-nvl72/"),
)
GPUS: Mapping[str, Gpu] = {
    name: Gpu(name=name, arch=arch, bandwidth=bandwidth, peaks=peaks, source=source)
    for name, arch, bandwidth, peaks, source in _ROWS
}
USUAL_GPUS = ("h100", "h200", "b200", "mi300x", "mi325x", "mi355x")
"""What is estimated where no GPU is named."""


ARCHITECTURES = tuple(dict.fromkeys(gpu.arch for gpu in GPUS.values()))


def gpus_of(arch: str) -> str:
    """The products of an architecture as people say them, or its own name."""
    return ", ".join(gpu.name.upper() for gpu in GPUS.values() if gpu.arch == arch) or arch


def gpu_name(gpu: str | None, asked: str | None = None) -> str:
    """How a GPU is written where a person reads: `H200 (sm90)`, `MI325X (gfx942)`.

    Args:
        gpu: a GPU or an architecture, which stands for the newest of its usual GPUs; None for any.
        asked: the name by which the user asked for it, which is used where it has the architecture.
    """
    if gpu is None:
        return "any GPU"
    known, wanted = _spelled(gpu), _spelled(asked or "")
    arch = GPUS[known].arch if known in GPUS else known
    products = [each.name for each in GPUS.values() if each.arch == arch]
    usual = [name for name in products if name in USUAL_GPUS] or products
    name = next((name for name in (wanted, known, *usual[-1:]) if name in products), None)
    return f"{name.upper()} ({arch})" if name else gpu


def gpu_names(gpus: Iterable[str], asked: str | None = None) -> str:
    """Several of them, as `gpu_name` writes each."""
    return ", ".join(gpu_name(each, asked) for each in gpus)


def architecture(name: str) -> str:
    """The architecture that a GPU or an architecture is named by, in any case of letters."""
    known = _spelled(name)
    if known in ARCHITECTURES:
        return known
    if known in GPUS:
        return GPUS[known].arch
    hint = f"{_meant(known, (*GPUS, *ARCHITECTURES))} (or give an architecture: sm90, gfx942, ...)"
    raise CheckpointError("--gpu", f"draftquant does not know the GPU {name!r}", fix=hint)


def named_gpu(name: str) -> Gpu:
    """The GPU that people call so, in any case of letters; `H100 SXM` is h100."""
    known = _spelled(name)
    if known in GPUS:
        return GPUS[known]
    what = f"no GPU in the table is called {name!r}"
    raise EstimateError("--gpu", what, fix=_meant(known, GPUS))


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of: {', '.join(names)}"


def _spelled(name: str) -> str:
    return name.lower().replace("-", "").replace(" ", "").removesuffix("sxm")
