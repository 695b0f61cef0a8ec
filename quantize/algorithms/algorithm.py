"""What an algorithm is: from a weight, and what was measured of its inputs, to codes and scales.

An algorithm knows tensors: neither names nor files, and not how a measurement came about.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ...recipes.schema import WeightFormat
from ..files.how_rounded import GptqFactors, LearnedRounding
from ..numerics.quantized_weight import QuantizedWeight
from .input_moments import InputMoments

Need = Literal["none", "second_moments", "codes"]
"""What calibration gives an algorithm: nothing, of a linear's inputs x the mean of x xᵀ, or the
codes and scales themselves, found for all linears of a draft together."""


class Statistics(Protocol):
    """What calibration measures of the inputs of a draft's linears, along its chain or blocks.

    Before any weight is rounded: on the shipped pairs the inputs that rounded linears hand on gave
    no better codes, and cost a pass over the traces for each of them. Results lie on disk.
    """

    def measure(self, modules: Sequence[str]) -> None:
        """Measure the inputs of some linears, all at once.

        Args:
            modules: canonical names, for example "layers.0.self_attn.q_proj".

        Raises:
            DraftQuantError: nothing could be measured.
        """

    def second_moments(self, modules: Sequence[str]) -> Mapping[str, InputMoments]:
        """Of measured linears, by name; one object for those that read the same inputs.

        Linears that too few inputs reached are not among them.
        """

    @property
    def too_few(self) -> Mapping[str, int]:
        """Experts' linears that too few tokens were routed to -> how many; of those asked for."""

    @property
    def factors(self) -> GptqFactors:
        """How the factors of the moments were found, where an algorithm asked for them."""


class FoundCodes(Protocol):
    """Codes and scales that calibration found, of all linears of a draft together; on disk."""

    @property
    def origin(self) -> LearnedRounding:
        """How, for provenance."""

    def quantized(self, module: str) -> QuantizedWeight:
        """The whole weight of a linear by its canonical name, of the recipe's format.

        Raises:
            DraftQuantError: nothing was found for it.
        """

    def weight(self, module: str) -> Tensor:
        """The weight of a norm that learned, in the dtype in which it is stored, on the CPU.

        Raises:
            DraftQuantError: nothing was found for it.
        """


class Algorithm:
    """One way to find codes and scales.

    Attributes:
        needs: what calibration must give. Codes that it finds for a whole draft are not found here:
            such an algorithm says for which formats alone.
    """

    needs: Need = "none"

    def problem(self, weights: WeightFormat) -> str | None:  # noqa: ARG002
        """Why this algorithm cannot find codes of a format, or None."""
        return None


class RowAlgorithm(Algorithm, ABC):
    """One that finds them weight by weight; rows of a weight are independent of each other."""

    @abstractmethod
    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: InputMoments | None,
    ) -> QuantizedWeight:
        """Quantize a block of rows of a weight.

        Args:
            weight: [rows, in_features] bfloat16, float16 or float32, finite.
            absmax: [1, 1] float32, largest magnitude that a scale of the *whole* matrix must cover:
                that of the weight and of those that engines fuse with it; None = that of `weight`.
            moments: of the inputs where `needs` says so, else None.
        """
