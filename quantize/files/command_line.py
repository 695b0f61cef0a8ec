"""A command line as provenance keeps it: what was asked for, not where it lay on some machine.

So equal runs in different folders give equal records, and none says how a user's folders are named.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from .hub_id import is_hub_id

_LEFT_OUT = {
    "--out": "--o",
    "--report": "--rep",
    "--html": "--ht",
    "--markdown": "--mar",
    "--junit": "--ju",
    "--plot": "--pl",
    "--token": "--to",
}
"""Options that are left out with their value -> the shortest spelling that argparse takes."""
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")


_RUNNING: ContextVar[tuple[str, ...]] = ContextVar("command line", default=())


@contextmanager
def command_line(argv: Sequence[str]) -> Iterator[None]:
    """Inside, everything that is made was asked for by this command line."""
    token = _RUNNING.set(tuple(argv))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_argv() -> tuple[str, ...]:
    """The command line that runs; nothing where Python called."""
    return _RUNNING.get()


def recorded_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """Arguments with names for paths, without tokens and outputs (`_LEFT_OUT`) and their values.

    Args:
        argv: as given. A Hub id stays whole, a token of the Hub nowhere.
    """
    return tuple(_recorded(iter(argv)))


def _recorded(argv: Iterator[str]) -> Iterator[str]:
    for argument in argv:
        option, assigns, value = argument.partition("=")
        if not option.startswith("--"):
            yield _named(argument)
        elif _is_left_out(option):
            if not assigns:
                next(argv, None)
        else:
            yield f"{option}={_named(value)}" if assigns else _named(option)


def _is_left_out(option: str) -> bool:
    return any(
        name.startswith(option) and len(option) >= len(least) for name, least in _LEFT_OUT.items()
    )


def _named(argument: str) -> str:
    name = argument
    if "/" in argument and (Path(argument).exists() or not is_hub_id(argument)):
        name = Path(argument).name
    return _TOKEN.sub("hf_...", name)
