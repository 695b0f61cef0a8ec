"""Errors: one class per stage, each saying where, what (expected, got) and how to fix it."""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxlist, _REPR.maxdict, _REPR.maxlong = 200, 16, 16, 50


class DraftQuantError(Exception):
    """Base of every error that a user can cause or mend.

    Args:
        where: file, tensor, flag or key that the problem is in.
        what: the problem, with what was expected and what was found.
        fix: what the user does about it.
    """

    def __init__(self, where: object, what: str, *, fix: str) -> None:
        super().__init__(f"{where}: {what}\n  fix: {fix}")
        self.where = str(where)
        self.what = what
        self.fix = fix


def short(value: object) -> str:
    """The `repr` of a value that a file holds, for a message: of bounded length, on one line."""
    return _REPR.repr(value)


class RecipeError(DraftQuantError):
    """A recipe file is missing or does not say what the schema asks for."""
