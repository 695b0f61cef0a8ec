"""An algorithm's interface: from a weight, and measurements of its inputs, to codes and scales."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...recipes.errors import BackendError
from ...recipes.schema import WeightFormat
from ..files.provenance import GptqFactors, LearnedRounding
from ..numerics.quantized_weight import QuantizedWeight

DAMPINGS = (0.01, 0.1, 1.0)
"""Dampings, added to the diagonal as a share of its mean, since few inputs are weak evidence. The
first is used, unless a matrix has no factor with it: then the next."""
DAMPING_PER_INPUT = 2.0
"""Times columns over inputs, added to the first damping where weights are corrected: what the
moments of n inputs say about c columns is off by about c / n of itself. By the divergence on other
prompts of three drafts, from 6 to 192 prompts, it was within 4 % of the best damping from 0.01 to 1
that were tried; 0.01 alone was up to 9 % worse."""
MOST_CHANGED = 0.25
"""Limit of a correction, as a share of a row's length. `verify` compares what is stored with the
source's weight; measured values were 0.02 to 0.22 for whole linears."""
_ROWS = 1024  # rows of a matrix that are reordered at a time
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in this thread, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feedback:
    """How one column's errors are compensated by the others: H = factor factorᵀ.

    Attributes:
        order: [in_features] int64, the columns with the least energy first: they are rounded last.
        factor: [in_features, in_features] float32 in that order, lower triangular: the outputs'
            squared error is the sum over columns c of (E factor)_c^2, to which columns >= c add.
    """

    order: Tensor
    factor: Tensor


class InputMoments:
    """The mean of x xᵀ over inputs x, rounded as they are when served.

    Args:
        mean: [in_features, in_features] float32, not changed.
        lost: [in_features, in_features] float32, the mean of e xᵀ, with e what rounding took from
            an input; None where weights are not to compensate it.
        device: on which its factor is found, and columns are rounded.
        precise: find the factor in float64, not float32: four times the time, twice the memory.
        on_factor: called with the damping that a factor was found with.
    """

    def __init__(
        self,
        mean: Tensor,
        device: torch.device | None = None,
        *,
        lost: Tensor | None = None,
        damping: float = DAMPINGS[0],
        precise: bool = False,
        name: str = "a linear",
        on_factor: Callable[[float], None] = lambda _damping: None,
    ) -> None:
        self.mean = mean
        self.lost = lost
        self.device = device or mean.device
        self.precise = precise
        self._dampings = (damping, *(more for more in DAMPINGS if more > damping))
        self.name = name
        self._on_factor = on_factor
        self._threads = torch.get_num_threads()
        self._feedback: Feedback | None = None
        self._correction: Tensor | None = None

    @property
    def squares(self) -> Tensor:
        """[in_features] float32, the mean squares of the inputs, side by side."""
        return self.mean.diagonal().contiguous()

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """One matrix at a time, with as many threads as the thread had that made this object."""
        with _ONE_AT_A_TIME, threads(self._threads):
            yield

    def feedback(self) -> Feedback:
        """The factor, found at the first call, within `all_threads`: 4 in_features^2 bytes."""
        if self._feedback is None:
            order = self.mean.diagonal().argsort(stable=True, descending=True).flip(0)
            factor = self._factor(order)
            if self.lost is not None:
                self._correction = self._corrected(order, factor)
            self._feedback = Feedback(order=order.to(self.device), factor=factor.float())
        return self._feedback

    def corrected(self, weight: Tensor) -> Tensor:
        """The weight [rows, in_features] float32 whose outputs the codes should approximate.

        W* = W + W M (H + d I)^-1, with H the mean of x xᵀ, M of e xᵀ and d the damping: of all
        weights the one that maps the rounded x to what W makes of x + e, on the average over
        inputs, without going far from W for little gain. That is
        (W C + d W) (H + d I)^-1 with C the mean of (x + e) xᵀ. No row goes further from W than
        `MOST_CHANGED`. Without M it is W itself. Call it within `all_threads`.
        """
        rows = weight.to(self.device).float()
        if self.lost is None:
            return rows
        self.feedback()
        assert self._correction is not None  # found beside the factor
        change = rows @ self._correction
        most = MOST_CHANGED * rows.norm(dim=1, keepdim=True)
        share = most / change.norm(dim=1, keepdim=True)
        return change.mul_(share.nan_to_num_(1.0).clamp_(max=1.0)).add_(rows)

    def _corrected(self, order: Tensor, factor: Tensor) -> Tensor:
        """M (H + d I)^-1 float32, of the factor of H + d I in an order; rows at a time."""
        assert self.lost is not None  # else there is nothing to correct
        columns = order.to(self.device)
        correction = torch.empty(self.mean.shape, device=self.device)
        for start in range(0, len(order), _ROWS):
            at = slice(start, start + _ROWS)
            rows = self.lost[at].to(self.device).index_select(1, columns).to(factor.dtype)
            correction[at].index_copy_(1, columns, torch.cholesky_solve(rows.T, factor).T.float())
        return correction

    @cached_property
    def as_inputs(self) -> Tensor:
        """Rows [in_features, in_features] float32 on the CPU with these moments, damped.

        A toolkit that reads nothing of inputs except their moments cannot tell them from measured
        ones.
        """
        factor = self._factor(torch.arange(len(self.mean), device=self.mean.device))
        return factor.T.contiguous().mul_(len(factor) ** 0.5).float().cpu()

    def _factor(self, order: Tensor) -> Tensor:
        """L, lower triangular, with L Lᵀ the damped moments in an order."""
        for damping in self._dampings:
            moments = self._ordered(order)
            average = moments.diagonal().mean()
            moments.diagonal().add_(torch.where(average > 0, damping * average, 1.0))
            columns = moments.T  # symmetric; in LAPACK's order, so that nothing is copied
            info = torch.empty((), dtype=torch.int32, device=self.device)
            factor: Tensor
            factor, info = torch.linalg.cholesky_ex(columns, out=(columns, info))
            if int(info) == 0:
                self._on_factor(damping)
                return factor
        precise = "" if self.precise else "try --precise, which computes it in float64, or "
        raise BackendError(
            self.name,
            "GPTQ finds no Cholesky factor of the second moments of its inputs, in"
            f" {moments.dtype}, with {self._dampings[-1]:g} of their mean added to the diagonal",
            fix=f"{precise}calibrate on more and other prompts, or round this linear to nearest",
        )

    def _ordered(self, order: Tensor) -> Tensor:
        """The moments with rows and columns in an order: a copy, on the device."""
        dtype = torch.float64 if self.precise else torch.float32
        columns = order.to(self.device)
        ordered = torch.empty(self.mean.shape, dtype=dtype, device=self.device)
        for start in range(0, len(order), _ROWS):
            rows = self.mean[order[start : start + _ROWS]].to(self.device)
            ordered[start : start + _ROWS] = rows.index_select(1, columns)
        return ordered


Moments = InputMoments | None
"""Moments of the inputs, where an algorithm needs them."""
Absmax = Tensor | None
"""[1, 1] float32, the largest magnitude that a scale of the *whole* matrix must cover: that of the
weight and of those that engines fuse with it; None = that of the weight."""
Need = Literal["none", "second_moments", "codes"]
"""What calibration gives an algorithm: nothing, the mean of x xᵀ over a linear's inputs x, or the
codes and scales themselves, found for all linears of a draft together."""


class Statistics(Protocol):
    """What calibration measures on the inputs of a draft's linears, along its chain or blocks.

    Before any weight is rounded: on the shipped pairs the inputs that rounded linears hand on gave
    no better codes, and cost a pass over the traces for each of them. Results lie on disk.
    """

    def measure(self, modules: Sequence[str]) -> None:
        """Measure the inputs of linears, by canonical names without .weight, all at once."""

    def second_moments(self, modules: Sequence[str]) -> Mapping[str, InputMoments]:
        """Moments of measured linears with enough inputs, by name; one object for equal inputs."""

    @property
    def too_few(self) -> Mapping[str, int]:
        """Experts' linears that too few tokens were routed to -> how many; only those asked for."""

    @property
    def factors(self) -> GptqFactors:
        """How the factors of the moments were found, where an algorithm asked for them."""


class FoundCodes(Protocol):
    """Codes and scales that calibration found for all linears of a draft together; on disk."""

    @property
    def origin(self) -> LearnedRounding:
        """How they were found, for provenance."""

    def quantized(self, module: str) -> QuantizedWeight:
        """The whole weight of a linear by its canonical name, in the recipe's format."""

    def weight(self, module: str) -> Tensor:
        """The weight of a norm that learned, in the dtype in which it is stored, on the CPU."""


class WeightAlgorithm:
    """One way to find codes and scales; `needs` says what calibration must give."""

    needs: Need = "none"

    def problem(self, weights: WeightFormat) -> str | None:  # noqa: ARG002
        """Why this algorithm cannot find codes of a format, or None."""
        return None


class RowAlgorithm(WeightAlgorithm, ABC):
    """One that finds codes weight by weight; rows of a weight are independent of each other."""

    @abstractmethod
    def quantize(
        self, weight: Tensor, weights: WeightFormat, *, absmax: Absmax, moments: Moments
    ) -> QuantizedWeight:
        """Quantize rows of a weight, [rows, in_features] bfloat16, float16 or float32, finite."""
