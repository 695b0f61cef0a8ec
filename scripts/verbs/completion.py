"""`completion`: what a shell completes commands, options and recipes by."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...recipes import DraftQuantError, aliases, built_in_recipes
from ...recipes.installing import imported
from ...recipes.listener import Heard
from ..frame.console import print_document
from ..frame.verb import Command, verb

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True)
class CompletionSettings(Heard):
    """Which shell."""

    shell: Shell


@verb(CompletionSettings)
def completion(settings: CompletionSettings) -> str:
    """Write the script by which a shell completes commands, options and recipes.

    Returns:
        The script, in the language of the shell.

    Raises:
        DraftQuantError: the package shtab is not installed.
    """
    from ..cli import every_parser

    what = "needs shtab, which is not here"
    shtab = imported("shtab", "completion", "completion", what, DraftQuantError)
    parser = every_parser()
    for action in _arguments_of(parser):
        offered = getattr(action, "offered", action.type)
        if action.dest in ("recipe", "recipes"):
            action.complete = _recipes()  # type: ignore[attr-defined]
        elif offered is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif isinstance(offered, tuple):
            action.choices = offered
    return str(shtab.complete(parser, settings.shell))


def _arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action.choices, Mapping):
            for below in action.choices.values():
                yield from _arguments_of(below)


def _recipes() -> dict[str, str | dict[str, str]]:
    names = " ".join((*aliases(), *built_in_recipes()))
    function = "_draftquant_recipes"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": f"{function}() {{\n"
            f'  compgen -W "{names}" -- "$1"\n'
            "  compgen -f -X '!*.yaml' -- \"$1\"\n"
            "}\n",
            "zsh": f"{function}() {{\n  compadd {names}\n  _files -g '*.yaml'\n}}\n",
            "fish": f"function {function}\n"
            f"  string split ' ' '{names}'\n"
            "  __fish_complete_suffix .yaml\n"
            "end\n",
        },
    }


COMMAND = Command(
    completion,
    lambda script, _: print_document(script),
    lambda script, settings: {"shell": settings.shell, "script": script},
)
