"""What both vendor backends need: a tested version, a usable weight, a process left unchanged."""

import contextlib
import fnmatch
import importlib.metadata
import io
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.errors import BackendError
from ...recipes.installing import install_line
from ...recipes.schema import Algorithm, BackendName, WeightFormat
from ..algorithms.algorithm import Absmax, Moments, Need
from ..numerics.number_formats import row_absmax
from .backend import ABSMAX_NEAREST, Backend

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOOLKIT_ERRORS = (
    ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError,
    AssertionError,
)  # fmt: skip
OURS = "use --backend torch (in a recipe: 'backend: torch')"
"""The fix where a toolkit cannot compute something."""


class VendorBackend(Backend):
    """A toolkit of a tested version or series ("0.47.*"); it takes whole weights."""

    package: str
    wanted: str

    def __init__(self, algorithm: Algorithm = ABSMAX_NEAREST) -> None:
        self._algorithm = algorithm
        self._gptq = algorithm.rounding == "gptq"
        self.needs: Need = "second_moments" if self._gptq else "none"

    @override
    def versions(self) -> dict[str, str]:
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError as exc:
            where = f"backend {self.name}"
            raise BackendError(
                where,
                f"expected the package {self.package}, which is not installed",
                fix=f"{install_line(self.name)}, or let torch compute: --backend torch",
            ) from exc
        if not fnmatch.fnmatchcase(version, self.wanted):
            where = f"backend {self.name}"
            raise BackendError(
                where,
                f"expected {self.package} {self.wanted}, got {version}, whose results were never"
                " verified",
                fix=f"pip install '{self.package}=={self.wanted}', or let torch compute: --backend"
                " torch",
            )
        return {self.package: version, "torch": torch.__version__}


@contextlib.contextmanager
def toolkit_errors(toolkit: str, where: str, *, fix: str) -> Iterator[None]:
    """Turn what a toolkit raises into a draftquant error."""
    try:
        yield
    except TOOLKIT_ERRORS as exc:
        what = f"{toolkit} failed: {type(exc).__name__}: {exc}"
        raise BackendError(where, what, fix=fix) from exc


def finite_absmax(backend: BackendName, weight: Tensor) -> Tensor:
    """Largest magnitude per row, [rows, 1], of a finite matrix that a toolkit accepts."""
    where = f"backend {backend}, weight {list(weight.shape)} {weight.dtype}"
    if weight.ndim != 2 or weight.numel() == 0 or weight.dtype not in WEIGHT_DTYPES:
        raise BackendError(
            where,
            "expected a non-empty matrix [rows, in_features] of bfloat16, float16 or float32",
            fix="keep this tensor: only weights of linear layers are quantized",
        )
    rows = row_absmax(weight)
    if not rows.isfinite().all():
        # Quark 0.13 silently turns inf into NaN, and in FP8 keeps NaN.
        raise BackendError(
            where,
            "expected finite values, got NaN or inf",
            fix="repair the source checkpoint",
        )
    return rows


def with_absmax(
    backend: BackendName, weight: Tensor, weights: WeightFormat, absmax: Absmax
) -> Tensor:
    """A weight for which a toolkit finds `absmax`: if that is larger, one more row holds it.

    No toolkit takes the largest magnitude as an argument; drop the codes of that row.
    `absmax` is [1, 1] float32, None = the weight's; the result is float32 if its dtype rounds it.
    """
    if absmax is None:
        return weight
    largest, wanted = float(row_absmax(weight).amax()), float(absmax)
    if not weights.scales_whole_matrix or wanted < largest:
        where = f"backend {backend}, weight {list(weight.shape)} {weight.dtype}"
        raise BackendError(
            where,
            f"expected an absmax of at least {largest:g}, for one scale of the whole matrix, got"
            f" {wanted:g} for {weights}",
            fix="pass the largest magnitude of this weight and of those fused with it",
        )
    if wanted == largest:
        return weight
    row = torch.full((1, weight.shape[1]), wanted)
    exact = row.to(weight.dtype)
    return torch.cat([weight, exact] if float(exact[0, 0]) == wanted else [weight.float(), row])


def gptq_inputs(moments: Moments) -> Tensor:
    """Inputs for a toolkit's GPTQ."""
    assert moments is not None  # `checked_measured` refused
    return moments.as_inputs


@contextlib.contextmanager
def process_state(**environment: str) -> Iterator[None]:
    """Set a toolkit's variables; afterwards environment, warnings and stdout are as before."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
