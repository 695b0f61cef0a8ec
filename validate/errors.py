"""The errors of this package; see `recipes.errors` for their form."""

from ..recipes.errors import DraftQuantError


class ReplayError(DraftQuantError):
    """Drafts cannot be replayed on these traces."""


class GateError(DraftQuantError):
    """The gate was asked for something that no policy allows; a verdict is never an error."""


class MeasureError(DraftQuantError):
    """A server cannot be measured, or a measurement is not what it claims to be."""


class ParityError(DraftQuantError):
    """Outputs or scores cannot be held against each other."""


class CompareError(DraftQuantError):
    """Drafts cannot be compared with each other, or not for the traffic that was asked about."""


class GoldenError(DraftQuantError):
    """Golden acceptance is not what it claims to be, or cannot be written of what is given."""


class CardError(DraftQuantError):
    """A model card lacks what it must say, or is given figures of another draft."""
