"""The errors of this package; see `recipes.errors` for their form."""

from ..recipes.errors import DraftQuantError


class TraceError(DraftQuantError):
    """A trace folder is not what it claims, cannot be recorded, or does not fit a draft."""


class PromptError(DraftQuantError):
    """A prompt file has lines that are no prompts."""


class LineProblem(Exception):  # noqa: N818 - collected, never seen by a user as an exception
    """What is wrong with one line of a prompt file, and its own fix where there is one."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class CalibrationError(DraftQuantError):
    """Statistics of a draft's activations cannot be taken."""


class DeviceError(DraftQuantError):
    """There is no such device, or it has too little memory."""


class ServerError(DraftQuantError):
    """A server does not answer, refuses, or is none of an engine."""


class NoAnswerError(ServerError):
    """A server gave no answer, however often it was asked."""
