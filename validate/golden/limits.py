"""What the acceptance of a live draft must not fall below, by golden acceptance.

A limit is the lower end of golden's 95 % interval, less the drop that is tolerated. What chance
moves the mean of some traffic by comes on top of that; see `prometheus_rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.bounds import SHARE
from ..errors import GoldenError
from .golden import ALL, Golden, GoldenCategory

ACCURACY = 1.96
"""Standard errors of golden's mean that count as its inaccuracy: to the lower end of its 95 %
interval, beyond which one golden acceptance in forty is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the acceptance of some traffic must not fall below.

    Attributes:
        category: of golden whose prompts are like this traffic; "" = all.
        golden: figures of these prompts.
        standard_error: of their mean acceptance length.
        max_drop: relative drop that is tolerated.
    """

    category: str
    golden: GoldenCategory
    standard_error: float
    max_drop: float

    @property
    def lowest(self) -> float:
        """Mean acceptance length at the limit."""
        mean = self.golden.mean_acceptance_length
        return (mean - ACCURACY * self.standard_error) * (1 - self.max_drop)

    @property
    def drop(self) -> float:
        """Relative drop that is never taken for one: the tolerated one, and golden's inaccuracy."""
        return 1 - self.lowest / self.golden.mean_acceptance_length

    @property
    def variance(self) -> float:
        """Of a mean over verify steps, times their number: steps of one request are alike."""
        return self.golden.variance_of_step * max(1.0, self.golden.design_effect or 1.0)


def limits_of(
    golden: Golden, max_drop: float, *, category: str = ALL, by_category: bool = False
) -> tuple[Limit, ...]:
    """The limit of the traffic, or that of each category.

    Args:
        max_drop: relative drop that is tolerated.
        category: of golden whose prompts are like the traffic; "" = all.

    Raises:
        GoldenError: the drop is not above 0 and below 1, golden has no categories or does not say
            how much its prompts differ, or no draft can accept less than the limit.
    """
    SHARE.check(GoldenError, "--max-drop", max_drop, fix="for example 0.01, which is 1 %")
    names: Sequence[str] = [category]
    if by_category:
        names = [name for name in golden.categories if name != ALL]
        if not names:
            raise GoldenError(
                "--category-label", "golden has no categories to hold its values against",
                fix="leave it out, or write golden acceptance of prompts with categories",
            )  # fmt: skip
    return tuple(_limit(name, golden.categories[name], max_drop) for name in names)


def _limit(category: str, golden: GoldenCategory, max_drop: float) -> Limit:
    where = f"golden, category {category!r}" if category else "golden"
    if not golden.standard_error:
        raise GoldenError(
            where,
            "does not say how much requests differ: it has one prompt, or all accept alike",
            fix="write it of more prompts (draftquant replay --golden)",
        )
    found = Limit(
        category=category,
        golden=golden,
        standard_error=golden.standard_error,
        max_drop=max_drop,
    )
    if found.lowest <= 1:
        mean = golden.mean_acceptance_length
        least = mean - ACCURACY * golden.standard_error
        raise GoldenError(
            "--max-drop",
            f"{where}: acceptance length {mean:.4f}, the lower end of whose 95% interval is"
            f" {least:.4f}, less {max_drop:.1%} is {found.lowest:.4f}, and no draft falls below 1:"
            " the alert would never fire",
            fix=f"give a drop below {1 - 1 / least:.4f}"
            if least > 1
            else "write golden acceptance of more prompts, or monitor a draft that accepts",
        )
    return found
