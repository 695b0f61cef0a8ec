"""The page of all commands, from the parsers that read the command line."""

import argparse
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from ...cli import every_parser
from .markdown import code, page, table, text

_INTRODUCTION = (
    "Results go to stdout; progress and errors go to stderr. Exit codes are 0 for done or PASS,"
    " 1 when verify, check or gate says no, 2 for bad input, 3 for INCONCLUSIVE or ANOMALOUS."
    " `draftquant COMMAND --help` prints what this page says."
)
_COLUMNS = ("argument", "meaning")
_NEARLY_EVERY = 0.8
"""Share of the commands at which common options are listed only once."""


def commands_page() -> str:
    """Every command, verb and argument; options that nearly all take are listed once."""
    found = list(_parsers(every_parser()))  # with the arguments of each of these
    common = _common([parser for parser, _ in found])
    sections = [_section(parser, summary, common) for parser, summary in found]
    if common:
        rows = (_row(action) for action in common.values())
        sections.insert(0, "## Options of nearly every command\n\n" + table(_COLUMNS, rows))
    return page("Commands", _INTRODUCTION, *sections)


def _common(parsers: Sequence[argparse.ArgumentParser]) -> dict[str, argparse.Action]:
    """Row -> option that nearly every command takes, meaning the same."""
    rows = [(" ".join(_row(each)), each) for parser in parsers for each in _actions(parser)]
    counts = Counter(row for row, _ in rows)
    return {row: each for row, each in rows if counts[row] > _NEARLY_EVERY * len(parsers)}


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers below one, depth first, each with its line in the list of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
            for name, sub in action.choices.items():
                yield sub, summaries.get(name, "")
                yield from _parsers(sub)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [
        action
        for action in parser._actions
        if not isinstance(action, hidden) and action.help != argparse.SUPPRESS
    ]


def _section(parser: argparse.ArgumentParser, summary: str, common: Container[str]) -> str:
    level = "#" * min(len(parser.prog.split()), 4)
    parts = [f"{level} {parser.prog}", _sentence(summary)]
    rows = [_row(action) for action in _actions(parser) if " ".join(_row(action)) not in common]
    if rows:
        parts.append(table(_COLUMNS, rows))
    return "\n\n".join(part.strip("\n") for part in parts)


def _sentence(summary: str) -> str:
    """A summary with a capital and an end; names keep their letters."""
    capital = summary if summary.startswith("vLLM") else summary[:1].upper() + summary[1:]
    return text(capital + ("" if capital.endswith(("?", ".")) else "."))


def _row(action: argparse.Action) -> list[str]:
    return [_spelling(action), text(_meaning(action))]


def _spelling(action: argparse.Action) -> str:
    """As a user writes it: `DRAFT`, `--out O`; several spellings with commas between."""
    value = ""
    if action.nargs != 0:
        value = _value(action)
    if not action.option_strings:
        return code(value)
    names = ", ".join(action.option_strings)
    needed = " (needed)" if action.required else ""
    return code(f"{names} {value}".strip()) + needed


def _value(action: argparse.Action) -> str:
    """The placeholder of the value, as often as it may be given."""
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
