"""The page of all commands, from the parsers that read the command line."""

import argparse
from collections.abc import Iterator

from ..cli import COMMANDS, _parser
from .markdown import code, page, table, text

_INTRODUCTION = (
    "Results go to stdout, progress and errors to stderr. Exit codes: 0 done or PASS; 1 verify,"
    " check or gate says no; 2 bad input; 3 INCONCLUSIVE or ANOMALOUS. `draftquant COMMAND --help`"
    " says the same as this page."
)


def commands_page() -> str:
    """Every command, verb and argument."""
    whole = _parser(tuple(COMMANDS))  # the commands that it is asked for have their arguments
    found = list(_parsers(whole))
    return page("Commands", _INTRODUCTION, *(_section(*each) for each in found))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers below one, in depth, each with its line in the list of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
            for name, sub in action.choices.items():
                yield sub, summaries.get(name, "")
                yield from _parsers(sub)


def _section(parser: argparse.ArgumentParser, summary: str) -> str:
    actions = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        and action.help != argparse.SUPPRESS
    ]
    level = "#" * min(len(parser.prog.split()), 4)
    parts = [f"{level} {parser.prog}", text(summary[:1].upper() + summary[1:]) + "."]
    if actions:
        rows = ([_spelling(action), text(_meaning(action))] for action in actions)
        parts.append(table(["argument", "meaning"], rows))
    return "\n\n".join(part.strip("\n") for part in parts)


def _spelling(action: argparse.Action) -> str:
    """As one writes it: `DRAFT`, `--out O`; several spellings with commas between."""
    value = ""
    if action.nargs != 0:
        value = _value(action)
    if not action.option_strings:
        return code(value)
    names = ", ".join(action.option_strings)
    needed = " (needed)" if action.required else ""
    return code(f"{names} {value}".strip()) + needed


def _value(action: argparse.Action) -> str:
    """What stands for the value, as often as it may be given."""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        one = action.metavar
    elif action.choices is not None:
        one = f"{{{','.join(map(str, action.choices))}}}"
    else:
        one = action.dest if not action.option_strings else action.dest.upper()
    if isinstance(action.nargs, int):
        return " ".join([one] * action.nargs)
    return {"?": f"[{one}]", "*": f"[{one} ...]", "+": f"{one} ..."}.get(action.nargs or "", one)


def _meaning(action: argparse.Action) -> str:
    """The help with its placeholders filled."""
    return (action.help or "") % {**vars(action), "prog": "draftquant"}
