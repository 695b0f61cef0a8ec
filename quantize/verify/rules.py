"""What is demanded of the codes and scales of a folder, by how it says that they were found."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import VerifyError
from ..files.checkpoint import PROVENANCE_FILE
from ..files.provenance import Method

ScaleRule = Literal["absmax", "searched", "positive", "about-absmax"]
CodeRule = Literal["nearest", "near", "about-nearest"]
_WORDS: Mapping[ScaleRule | CodeRule, str] = {
    "absmax": "exact absmax scales",
    "searched": "scales of a search around absmax",
    "positive": "positive scales",
    "about-absmax": "scales of other tools (absmax; of INT4 also searched ones)",
    "nearest": "exactly the nearest quantized values",
    "near": "quantized values with at most 4 times the error of the nearest",
    "about-nearest": "quantized values of other tools (nearest; of INT4 also GPTQ's)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is demanded of every quantized linear.

    Attributes:
        scales: "absmax": bit for bit those of the largest magnitudes. "searched": of rows and
            groups between the ends of the search (`searched_shares`), that of a whole matrix
            exactly. "positive": finite and above zero. "about-absmax": those of absmax but for the
            roundings of other tools, of INT4 by any of their rules.
        codes: "nearest": bit for bit the nearest to weight / stored scale, as this package divides.
            "near": not much further off than these, see `near`. "about-nearest": nearest but for
            the roundings of other tools; of INT4 GPTQ's as well.
        corrected: the weights were changed for the rounding of their inputs before (input
            correction), as far as the record says.
    """

    scales: ScaleRule
    codes: CodeRule
    corrected: bool = False

    @property
    def by_absmax(self) -> bool:
        """True if scales follow from the largest magnitudes bit for bit, or lie about them."""
        return self.scales in ("absmax", "searched")

    @property
    def of_our_own(self) -> bool:
        """True if bits are held against a recipe of this package, which stores one way only."""
        return self.codes != "about-nearest"

    def __str__(self) -> str:
        corrected = ", of weights with input correction" if self.corrected else ""
        return f"{_WORDS[self.scales]}, {_WORDS[self.codes]}{corrected}"


FOREIGN = Rule(scales="about-absmax", codes="about-nearest")
"""Of a folder that another tool made."""
_LEARNED = Rule(scales="positive", codes="near")
_RULES: Mapping[tuple[str, str], Rule] = {
    ("absmax", "nearest"): Rule(scales="absmax", codes="nearest"),
    ("mse", "nearest"): Rule(scales="searched", codes="nearest"),
    ("absmax", "gptq"): Rule(scales="absmax", codes="near"),
    ("mse", "gptq"): Rule(scales="searched", codes="near"),
    ("absmax", "learned"): _LEARNED,
    ("mse", "learned"): _LEARNED,
}
"""By the recipe's `scale` and `rounding`."""


def rule_of(method: Method | None) -> Rule:
    """The rule of a recipe's algorithm; None = another tool made the folder.

    Raises:
        VerifyError: nothing is known of this algorithm.
    """
    if method is None:
        return FOREIGN
    algorithm = method.recipe.algorithm
    rule = _RULES.get((algorithm.scale, algorithm.rounding))
    if rule is None:
        raise VerifyError(
            f"{PROVENANCE_FILE}: recipe.algorithm",
            f"scale {algorithm.scale!r} with rounding {algorithm.rounding!r}: what its codes must"
            " be is not known",
            fix="use a version of draftquant that knows this algorithm",
        )
    return replace(rule, corrected=algorithm.input_correction == "auto")
