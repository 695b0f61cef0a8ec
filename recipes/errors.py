"""Errors: one class per stage, each saying where, what (expected, got) and how to fix it."""

import reprlib
from collections.abc import Sequence

_LONGEST_FIELD = 4000  # characters
_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxlist, _REPR.maxdict, _REPR.maxlong = 200, 12, 12, 50


class DraftQuantError(Exception):
    """Base of every error that a user can cause or mend: where, what (expected, got), and the fix.

    Each text is one line of bounded length and holds no control characters, whatever it quotes.
    `ids`: of all prompts that it is about, where `what` names the first ones.
    """

    def __init__(
        self,
        where: object,
        what: str,
        *,
        fix: str,
        details: Sequence[str] = (),
        ids: Sequence[str] = (),
    ) -> None:
        self.where = _field(str(where))
        self.what = _field(what)
        self.fix = _field(fix)
        self.details = tuple(map(_field, details))
        self.ids = tuple(ids)
        first = f"{self.where}: {self.what}"
        super().__init__("\n".join([first, *self.details, f"  fix: {self.fix}"]))

    def move(self, where: str) -> None:
        """Give it another place: a caller from Python knows an option as an argument."""
        self.args = (where + str(self).removeprefix(self.where),)
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle it for another process; plain pickling fails because `__init__` takes keywords."""
        return _error, (type(self), str(self), self.__dict__)


def _error(cls: type[DraftQuantError], text: str, fields: dict[str, object]) -> DraftQuantError:
    error = cls.__new__(cls, text)
    error.__dict__.update(fields)
    return error


class DraftQuantWarning(UserWarning):
    """A warning of a function of `draftquant.api`: what the command line prints as a warning."""


def first_line(exc: BaseException) -> str:
    """The first line of a foreign message, which may be long and quote its input; never empty."""
    return (str(exc).strip() or repr(exc)).splitlines()[0]


def short(value: object) -> str:
    """The `repr` of a value that a file holds, for a message: of bounded length, on one line."""
    return _REPR.repr(value)


def reason(exc: Exception) -> str:
    """Why a file cannot be read, without its name, which the message already has."""
    return getattr(exc, "strerror", None) or str(exc)


def visible(text: str) -> str:
    """Foreign text as a terminal may show it: unprintable characters become Python's escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _field(text: str) -> str:
    return visible(text if len(text) <= _LONGEST_FIELD else text[:_LONGEST_FIELD] + "…")


class SettingsError(DraftQuantError):
    """An argument of a verb has a wrong type, is out of bounds, or lacks its partner."""


class RecipeError(DraftQuantError):
    """A recipe file is missing or does not say what the schema asks for."""


PASS_TRACES = (
    "pass --traces CALIBRATION, recorded on other prompts than those of the gate; from one folder:"
    " draftquant traces split TRACES --fraction 0.3 --out CALIBRATION GATE"
)
"""The fix where a recipe must know the inputs of the linears."""


class CheckpointError(DraftQuantError):
    """A draft folder, its config, its index or a safetensors header is not what it claims."""


class PlanError(DraftQuantError):
    """The recipe and the draft do not fit each other."""


class LayoutError(DraftQuantError):
    """A layout cannot express the recipe's formats."""


class BackendError(DraftQuantError):
    """A vendor toolkit is missing, unusable, or refused a weight."""


class OutputError(DraftQuantError):
    """An output, folder or file, cannot be written: it exists, overlaps the input, ..."""


class VerifyError(DraftQuantError):
    """The folder to verify cannot even be read as a quantized draft."""


class NoRecipeError(VerifyError):
    """No recipe makes a draft that may pass."""


class DeclarationError(VerifyError):
    """A declaration says something that draftquant does not understand: the input is to blame."""


class ForwardError(DraftQuantError):
    """A draft computes NaN or infinity."""


class EstimateError(DraftQuantError):
    """Speed cannot be estimated: the GPU, the target or a number is unknown."""


class TraceError(DraftQuantError):
    """A trace folder is not what it claims, cannot be recorded, or does not fit a draft."""


class PromptError(DraftQuantError):
    """A prompt file has lines that are not prompts."""


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
    """A server does not answer, refuses, or is not a server of this engine."""


class NoAnswerError(ServerError):
    """A server gave no answer, however often it was asked."""


class ReplayError(DraftQuantError):
    """Drafts cannot be replayed on these traces."""


class GateError(DraftQuantError):
    """The gate was asked for something that no policy allows; a verdict is never an error."""


class MeasureError(DraftQuantError):
    """A server cannot be measured, or a measurement is not what it claims to be."""


class ParityError(DraftQuantError):
    """Outputs or scores cannot be compared with each other."""


class CompareError(DraftQuantError):
    """Drafts cannot be compared with each other, or not for the traffic in question."""


class GoldenError(DraftQuantError):
    """Golden acceptance is not what it claims to be, or cannot be written from what is given."""


class CardError(DraftQuantError):
    """A model card lacks what it must say, or is given the figures of another draft."""
