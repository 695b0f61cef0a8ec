"""`draftquant completion`: what a shell completes commands, flags and recipes by."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...recipes import DraftQuantError, aliases, built_in_recipes
from ..console import print_document, print_json

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`completion SHELL`."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    try:
        import shtab
    except ImportError as exc:
        fix = "pip install 'draftquant[completion]'"
        raise DraftQuantError("completion", "needs shtab, which is not here", fix=fix) from exc

    from ..cli import every_parser

    parser = every_parser()
    for action in _arguments_of(parser):
        if action.dest in ("recipe", "recipes"):
            action.complete = _recipes()  # type: ignore[attr-defined]
        elif getattr(action, "is_path", action.type is Path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, options.shell)
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print_document(script)
    return 0


def _arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of all below it."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, Mapping):
            for below in action.choices.values():
                yield from _arguments_of(below)


def _recipes() -> dict[str, str | dict[str, str]]:
    """Names of recipes, and recipe files, as each shell completes them."""
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
