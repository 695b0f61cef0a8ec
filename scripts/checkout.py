"""What only a checkout has: the shapes of published drafts are not installed."""

import importlib.util
from pathlib import Path

from ..recipes.errors import DraftQuantError

REAL_SHAPES = "draftquant.scripts.real_shapes"
ROOT = Path(__file__).resolve().parents[1]
"""Of the checkout."""


class CheckoutError(DraftQuantError):
    """A command needs what only a checkout has."""


def check_checkout(command: str) -> None:
    """The shapes of published drafts are here.

    Raises:
        CheckoutError: they are not; `command` needs them.
    """
    if importlib.util.find_spec(".real_shapes", __package__) is None:
        raise CheckoutError(
            command,
            f"expected the package {REAL_SHAPES}, which is in a checkout and not in the wheel",
            fix="clone the repository, install it with pip install -e, and run it from there",
        )
