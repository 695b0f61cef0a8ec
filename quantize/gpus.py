"""GPUs by the names that people use, from the rows of `gpus.toml`, which has the sources."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..recipes.errors import CheckpointError, EstimateError
from ..recipes.formats import NumberFormat, Precision
from ..recipes.packages import table_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a kind.

    Attributes:
        arch: the architecture that engines ask for, such as "gfx942" or "sm90".
        bandwidth: of its memory, in bytes per second.
        peaks: dense FLOP per second by precision, without structured sparsity; weights of other
            precisions are widened and multiplied as bf16.
        source: the document that states these.
    """

    name: str
    arch: str
    bandwidth: float
    peaks: Mapping[Precision, float]
    source: str

    @property
    def widens_fp4(self) -> bool:
        """Kernels widen FP4 weights as they read them (vLLM 0.33: Marlin, on CUDA).

        Otherwise the format is emulated: its weights are written in 16 bits and read again
        (`EmulationNvFp4LinearKernel`, `EmulationMxfp4LinearKernel`, on ROCm).
        """
        return self.arch not in AMD

    def computes_in(self, precision: Precision) -> Precision:
        """The precision itself where the GPU has a unit for it, else bf16."""
        return precision if precision in self.peaks else "bf16"

    def emulates(self, number: NumberFormat) -> bool:
        """Whether weights in it are written out in 16 bits and read again at each use."""
        return number.is_fp4 and number.unit not in self.peaks and not self.widens_fp4


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name=name, **row) for name, row in table_beside(__file__).items()
}
USUAL_GPUS = ("h100", "h200", "b200", "mi300x", "mi325x", "mi355x")
"""The GPUs of an estimate where none is named."""


ARCHITECTURES = tuple(dict.fromkeys(gpu.arch for gpu in GPUS.values()))
AMD = tuple(arch for arch in ARCHITECTURES if arch.startswith("gfx"))
"""Architectures for which engines have ROCm's kernels."""


def gpus_of(arch: str) -> str:
    """The products of an architecture as people name them, or the architecture's name."""
    return ", ".join(gpu.name.upper() for gpu in GPUS.values() if gpu.arch == arch) or arch


def gpu_name(gpu: str | None, asked: str | None = None) -> str:
    """A GPU's name for people: `H200 (sm90)`, `MI325X (gfx942)`.

    Args:
        gpu: a GPU, or an architecture, which means the newest of its usual GPUs; None for any.
        asked: the name that the user gave, which is used where it has the architecture.
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
    """The architecture of a GPU, or the architecture itself, in any case of letters."""
    known = _spelled(name)
    if known in ARCHITECTURES:
        return known
    if known in GPUS:
        return GPUS[known].arch
    hint = f"{_meant(known, (*GPUS, *ARCHITECTURES))} (or give an architecture: sm90, gfx942, ...)"
    raise CheckpointError("--gpu", f"draftquant does not know the GPU {name!r}", fix=hint)


def named_gpu(name: str) -> Gpu:
    """The GPU with this common name, in any case of letters; `H100 SXM` is h100."""
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
