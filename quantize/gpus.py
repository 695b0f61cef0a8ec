"""GPUs by the names that people say: their architecture, memory bandwidth and dense peaks.

The one table of GPUs: engines are asked by architecture, estimates count with bandwidth and peaks.
Sources: AMD ROCm and NVIDIA CUDA tables of GPUs for architectures, data sheets for figures.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..recipes.formats import NumberFormat, Precision
from .errors import CheckpointError, EstimateError

_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture"
_AMD = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a kind.

    Attributes:
        arch: the architecture that engines ask for, such as "gfx942" or "sm90".
        bandwidth: of its memory, in bytes per second.
        peaks: dense FLOP per second by precision, without structured sparsity; a precision that is
            not there has no unit: its weights are widened and multiplied as bf16.
        widens_fp4: kernels widen FP4 weights as they read them (vLLM 0.33: Marlin, on CUDA); else
            such a format is emulated: its weights are written out in 16 bits and read again
            (`EmulationNvFp4LinearKernel`, `EmulationMxfp4LinearKernel`, on ROCm).
        source: the document that says so.
    """

    name: str
    arch: str
    bandwidth: float
    peaks: Mapping[Precision, float]
    source: str
    widens_fp4: bool = True

    def computes_in(self, precision: Precision) -> Precision:
        """The precision itself where the GPU has a unit for it, else bf16."""
        return precision if precision in self.peaks else "bf16"

    def emulates(self, number: NumberFormat) -> bool:
        """Whether weights in it are written out in 16 bits and read again at each use."""
        return number.is_fp4 and number.unit not in self.peaks and not self.widens_fp4


# NVIDIA prints peaks with sparsity (but for A100): they are halved here. AMD prints both.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="mi300x",
            arch="gfx942",
            bandwidth=5.3e12,
            peaks={"bf16": 1307.4e12, "fp8": 2614.9e12},
            source=_AMD + "data-sheets/amd-instinct-mi300x-data-sheet.pdf",
            widens_fp4=False,
        ),
        # Computes as MI300X.
        Gpu(
            name="mi325x",
            arch="gfx942",
            bandwidth=6e12,
            peaks={"bf16": 1307.4e12, "fp8": 2614.9e12},
            source=_AMD + "product-briefs/instinct-mi325x-datasheet.pdf",
            widens_fp4=False,
        ),
        # FP8 is OCP's: 256 compute units x 8,192 and 16,384 FLOP x 2.2 GHz.
        Gpu(
            name="mi350x",
            arch="gfx950",
            bandwidth=8e12,
            peaks={"bf16": 2309.6e12, "fp8": 4614e12, "mxfp4": 9227e12},
            source=_AMD + "product-briefs/amd-instinct-mi350x-gpu-brochure.pdf",
            widens_fp4=False,
        ),
        # The same at 2.4 GHz.
        Gpu(
            name="mi355x",
            arch="gfx950",
            bandwidth=8e12,
            peaks={"bf16": 2516.6e12, "fp8": 5033.2e12, "mxfp4": 10066e12},
            source=_AMD + "product-briefs/amd-instinct-mi355x-gpu-brochure.pdf",
            widens_fp4=False,
        ),
        # 80 GB SXM.
        Gpu(name="a100", arch="sm80", bandwidth=2.039e12, peaks={"bf16": 312e12}, source=_A100),
        # PCIe, GDDR6.
        Gpu(
            name="l40s",
            arch="sm89",
            bandwidth=0.864e12,
            peaks={"bf16": 362.05e12, "fp8": 733e12},
            source="https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        # SXM5, 80 GB: 3.35 TB/s; 1,979 and 3,958 TFLOPS with sparsity.
        Gpu(
            name="h100",
            arch="sm90",
            bandwidth=3.35e12,
            peaks={"bf16": 989.5e12, "fp8": 1979e12},
            source="https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306",
        ),
        # SXM, 141 GB: 4.8 TB/s, computes as H100.
        Gpu(
            name="h200",
            arch="sm90",
            bandwidth=4.8e12,
            peaks={"bf16": 989.5e12, "fp8": 1979e12},
            source="https://resources.nvidia.com/en-us-gpu-resources/hpc-datasheet-sc23",
        ),
        # 96 GB HBM3; computes as H100.
        Gpu(
            name="gh200",
            arch="sm90",
            bandwidth=4e12,
            peaks={"bf16": 989.5e12, "fp8": 1979e12},
            source="https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip",
        ),
        # HGX, 1000 W; 4.5, 9 and 18 PFLOPS with sparsity.
        Gpu(
            name="b200",
            arch="sm100",
            bandwidth=8e12,
            peaks={"bf16": 2250e12, "fp8": 4500e12, "nvfp4": 9000e12, "mxfp4": 9000e12},
            source=_BLACKWELL,
        ),
        # One of 72 in GB200 NVL72, 1200 W; 5, 10 and 20 PFLOPS with sparsity.
        Gpu(
            name="gb200",
            arch="sm100",
            bandwidth=8e12,
            peaks={"bf16": 2500e12, "fp8": 5000e12, "nvfp4": 10000e12, "mxfp4": 10000e12},
            source=_BLACKWELL,
        ),
        # Blackwell Ultra, one of eight in HGX B300: 36, 72 PFLOPS with sparsity, 105 dense in FP4.
        Gpu(
            name="b300",
            arch="sm103",
            bandwidth=8e12,
            peaks={"bf16": 2250e12, "fp8": 4500e12, "nvfp4": 13125e12, "mxfp4": 13125e12},
            source="https://www.nvidia.com/en-us/data-center/hgx/",
        ),
        # One of 72 in GB300 NVL72: 360 and 720 PFLOPS with sparsity, 1,080 dense in FP4, 576 TB/s.
        Gpu(
            name="gb300",
            arch="sm103",
            bandwidth=8e12,
            peaks={"bf16": 2500e12, "fp8": 5000e12, "nvfp4": 15000e12, "mxfp4": 15000e12},
            source="https://www.nvidia.com/en-us/data-center/gb300-nvl72/",
        ),
    )
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
            What is in no table is written as it stands.
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
    """The architecture that a GPU or an architecture is named by, in any case of letters.

    Raises:
        CheckpointError: nobody calls a GPU so.
    """
    known = _spelled(name)
    if known in ARCHITECTURES:
        return known
    if known in GPUS:
        return GPUS[known].arch
    hint = f"{_meant(known, (*GPUS, *ARCHITECTURES))} (or give an architecture: sm90, gfx942, ...)"
    raise CheckpointError("--gpu", f"draftquant does not know the GPU {name!r}", fix=hint)


def named_gpu(name: str) -> Gpu:
    """The GPU that people call so, in any case of letters; `H100 SXM` is h100.

    Raises:
        EstimateError: the table has no GPU of that name.
    """
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
