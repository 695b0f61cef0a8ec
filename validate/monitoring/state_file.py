"""State files of watches and canaries: read whole, and only by what wrote them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from ...recipes.errors import reason, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import WatchError

_SIGNED = frozenset({"log_sums", "weighted"})
"""Keys of numbers that may be below 0; all others are counts, times and the like."""
_MOST = 2.0**53
OTHER = "give a file that does not exist yet, or remove this one to begin anew"


class State(Protocol):
    """A state, and of what it is."""

    @property
    def of(self) -> Mapping[str, str]:
        """What is watched, in words and figures: nothing else goes on with it."""


S = TypeVar("S", bound=State)


def read_state_of(kind: type[S], what: str, path: Path, of: Mapping[str, str]) -> S | None:
    """The state in a file; None where there is no file yet.

    Args:
        kind: of the state.
        what: it is of, such as "watch"; its format is "draftquant watch" then.
        path: of the file.
        of: what is watched now.

    Raises:
        WatchError: it cannot be read, is something else, or of something else.
    """
    form = f"draftquant {what}"
    try:
        found = parse_object(read_text(path))
        if found.get("format") != form:
            raise WatchError(path, f"is no state of a {what}: expected format {form!r}, got"
                             f" {short(found.get('format'))}", fix=OTHER)  # fmt: skip
        state: S = decode(kind, found)
        for key, number in _numbers(found):
            if not (-_MOST if key in _SIGNED else 0) <= number <= _MOST:
                raise WatchError(path, f"{key}: {number:g} cannot be", fix=OTHER)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise WatchError(path, f"cannot be read: {reason(exc)}", fix=OTHER) from exc
    except JsonProblem as exc:
        raise WatchError(path, f"is no state of a {what}: {exc}", fix=OTHER) from exc
    for key in dict.fromkeys((*of, *state.of)):
        if (own := state.of.get(key)) != (given := of.get(key)):
            raise WatchError(
                path,
                f"is the state of another {what}: {key} is {short(own or 'not said')} there, and"
                f" {short(given or 'not said')} here",
                fix=OTHER,
            )
    return state


def _numbers(found: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document, with the key that it stands under."""
    if isinstance(found, int | float):
        yield key, found
    elif isinstance(found, Mapping):
        for name, one in found.items():
            yield from _numbers(one, name)
    elif isinstance(found, list):
        for one in found:
            yield from _numbers(one, key)
