"""Parsers of the command line: errors say what was meant, with that command's usage and one fix.

They know arguments, not what commands do.
"""

import argparse
import collections.abc
import dataclasses
import os
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from ...recipes.errors import DraftQuantError, short
from ...recipes.python_values import members
from .arguments import Option, meant
from .help_text import GROUPS, MANY, NEEDED, RARE, HelpFormatter, heading, listed, wrapped
from .settings import Form, WordsError


class UsageError(DraftQuantError):
    """A command line that cannot be parsed; `usage` is the line of the command in question."""

    def __init__(self, where: object, what: str, *, fix: str, usage: str = "") -> None:
        super().__init__(where, what, fix=fix)
        self.usage = usage


class CommandParser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, and says what was probably meant.

    Attributes:
        examples: working command lines, shown in `--help`, and as the fix for what is missing.
        commands: name -> parser of a subcommand; empty for a leaf.
        common: options that every command takes.
        form: of the verb; parsing turns the words into its record, `settings` of the namespace.
    """

    def __init__(self, *, examples: Sequence[str], **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(add_help=False, **kwargs)
        self.examples = tuple(examples)
        self.commands: Mapping[str, CommandParser] = {}
        self.common: Sequence[argparse.Action] = ()
        self._listing: Mapping[str, Mapping[str, str]] = {}
        self.form: Form[Any] | None = None

    def takes(self, form: Form[Any]) -> None:
        """Add the fields of a verb's settings as arguments."""
        self.form = form
        alone = {
            name: group
            for names in filter(None, (form.exclusive, form.one_of))
            for group in (self.add_mutually_exclusive_group(required=names == form.one_of),)
            for name in names
        }
        hints = typing.get_type_hints(form.record)
        fields = {each.name: each for each in dataclasses.fields(form.record)}
        names = {name: option.spelling(name) for name, option in form.options.items()}
        for name, option in form.options.items():
            needed = fields[name].default is fields[name].default_factory is dataclasses.MISSING
            action = _add(alone.get(name, self), name, option, hints[name], needed=needed)
            action.help = option.explained(names).replace("%", "%%")

    def format_help(self) -> str:
        """As in argparse, with commands in groups, common options in short, and examples."""
        columns = shutil.get_terminal_size().columns - 2
        paragraphs = [textwrap.fill(f"every command takes: {_IN_SHORT}", columns)]
        if self.examples:
            noun = "example" if len(self.examples) == 1 else "examples"
            paragraphs.append("\n".join((f"{noun}:", *wrapped(self.examples, columns))))
        if self.epilog:
            paragraphs.append(textwrap.fill(self.epilog, columns))
        listing = "\n".join(listed(self._listing, columns))
        kept = self.description, self.epilog
        self.description = "\n\n".join(filter(None, (self.description, listing)))
        self.epilog = "\n\n".join(paragraphs)
        try:
            return super().format_help()
        finally:
            self.description, self.epilog = kept

    def list_commands(self, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Show the commands in groups: heading -> name -> summary."""
        self._listing = groups
        self._positionals._group_actions.clear()  # argparse would list them once more

    def below(self, name: str) -> "CommandParser":
        """The parser of a command; if there is none, an error says what was meant."""
        if name not in self.commands:
            self._refuse_command(name)
        return self.commands[name]

    def add_subparsers(self, **kwargs: Any) -> Any:
        """As in argparse; also stores the parsers in `commands`."""
        action = super().add_subparsers(prog=self.prog, **kwargs)
        self.commands = action.choices
        return action

    def has(self, option: str) -> bool:
        """Whether an option is declared already."""
        return option in self._option_string_actions

    def group_options(self) -> None:
        """Show the options under headings, where there are many."""
        options = self._optionals._group_actions
        if len(options) <= MANY:
            options.sort(key=lambda option: not option.required)
            return
        options = list(options)
        groups: dict[str, argparse._ArgumentGroup] = {}
        for title in (NEEDED, *GROUPS, RARE):
            grouped = [option for option in options if heading(option) == title]
            if grouped:
                groups[title] = self.add_argument_group(title)
            for option in grouped:
                self._optionals._group_actions.remove(option)
                groups[title]._group_actions.append(option)

    def keep(self, option: str) -> None:
        """Let an option that is left out keep the value that a parser above gave it."""
        self._option_string_actions[option].default = argparse.SUPPRESS

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but an unknown argument is an error of the command itself."""
        self._check_options(args)
        self._words = list(args)
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:
            self._refuse_extras(extras)
        if self.form is not None:
            parsed.settings, parsed.form = self._decoded(self.form, parsed), self.form
        return parsed, extras

    def _decoded(self, form: Form[Any], parsed: argparse.Namespace) -> Any:
        words = {n: getattr(parsed, n) for n in form.options if hasattr(parsed, n)}
        given = {n: (word,) if isinstance(word, str) else word for n, word in words.items()}
        try:
            return form.from_words(given)
        except WordsError as exc:
            self._fail(exc.where, exc.what, exc.fix or f"see '{self._help()}'")

    def error(self, message: str) -> NoReturn:
        """Report what argparse found."""
        if message.startswith("the following arguments are required: --"):
            self._refuse_misplaced(message.partition(": ")[2].split(", "))
        match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        where, what = (match[1], match[2]) if match else (self.prog, message)
        if "not allowed with" in what:
            fix = "leave one of the two out"
        elif "ambiguous option" in what:
            fix = "write the option out"
        else:
            fix = self._example_or_help()
        self._fail(where, what.replace("the following arguments are required", "missing"), fix)

    def _refuse_misplaced(self, missing: Sequence[str]) -> None:
        """Words that fit no place, where options are missing: Python would take them in order."""
        needed = [action for action in self._actions if action.required and action.option_strings]
        for action in needed:
            action.required = False
        try:
            _, extras = super().parse_known_args(self._words, argparse.Namespace())
        finally:
            for action in needed:
                action.required = True
        if not extras or extras[0].startswith("-"):
            return
        named = [f"{name.partition('/')[0]} {word}" for name, word in zip(missing, extras)]  # noqa: B905
        kept = [word for word in self._words if word not in extras]
        fix = f"name what they are: {' '.join((self.prog, *kept, *named))}"
        number = f"{len(extras)} arguments" if len(extras) > 1 else "one argument"
        words = ", ".join(map(short, extras))
        self._fail(
            self.prog, f"{number} too many: {words}; and {', '.join(missing)} is missing", fix
        )

    def _fail(self, where: object, what: str, fix: str) -> NoReturn:
        raise UsageError(where, what, fix=fix, usage=self.format_usage().strip())

    def _example_or_help(self) -> str:
        return f"for example: {self.examples[0]}" if self.examples else f"see '{self._help()}'"

    def _help(self) -> str:
        return f"{self.prog} --help"

    def _check_options(self, args: Sequence[str]) -> None:
        """Report a misspelt option before what is missing because of it, among our arguments."""
        known = self._option_string_actions
        for argument in args:
            name = argument.partition("=")[0]
            if argument == "--" or (self.commands and not argument.startswith("-")):
                return
            is_text = " " in name  # one option's value, such as --target-args "--dtype float16"
            if (
                name.startswith("--")
                and not is_text
                and not any(each.startswith(name) for each in known)
            ):
                self._refuse_option(name)

    def _refuse_option(self, name: str) -> NoReturn:
        """Say what was meant, perhaps an argument with a place, or where options are listed."""
        options = [each[2:] for each in self._option_string_actions if each[:2] == "--"]
        places = {each.lower(): each for each in self._places()}
        near = meant(name.lstrip("-"), options, tuple(places))
        fix = f"did you mean --{near}?" if near else f"'{self._help()}' lists the options"
        if near in places:
            fix = f"{places[near]} is given by its place, {self._example_or_help()}"
        self._fail(self.prog, f"has no option {name}", fix)

    def _places(self) -> list[str]:
        """Positional arguments, as usage names them."""
        taken = () if self.commands else self._actions
        return [str(each.metavar or each.dest) for each in taken if not each.option_strings]

    def _refuse_extras(self, extras: Sequence[str]) -> NoReturn:
        option = next((each for each in extras if each.startswith("-") and len(each) > 1), None)
        if option is not None:
            self._refuse_option(option.partition("=")[0])
        names = self._places()
        fix = f"leave it out, or see '{self._help()}'"
        if self.examples:
            fix = f"leave it out, as in: {self.examples[0]}"
        if len(names) > 1:
            fix = f"give {' '.join(names)} side by side, and nothing more"
        self._fail(self.prog, f"one argument too many: {short(extras[0])}", fix)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check that a command exists: the verb's settings decode all other words."""
        if action.choices is None or value in action.choices:
            return
        self._refuse_command(str(value))

    def _refuse_command(self, name: str) -> NoReturn:
        near = meant(name, list(self.commands))
        program, *verb = self.prog.split()
        listing = " ".join((program, "help", *verb))
        fix = f"did you mean '{self.prog} {near}'?" if near else f"see '{listing}'"
        self._fail(self.prog, f"has no command {short(name)}", fix)


def _add(
    parser: argparse._ActionsContainer, name: str, option: Option, hint: Any, *, needed: bool
) -> argparse.Action:
    """Add one field of settings as an argument; its words are kept unchanged."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    origin = typing.get_origin(kinds[0]) or kinds[0]
    metavar: str | tuple[str, ...] | None = option.place or option.value
    if origin is Literal and metavar is None:
        metavar = f"{{{','.join(map(str, typing.get_args(kinds[0])))}}}"
    given: dict[str, Any] = {"default": argparse.SUPPRESS}
    if kinds == [bool]:
        given["action"] = "store_true"
    elif origin in (tuple, collections.abc.Sequence, collections.abc.Mapping):
        if option.several == "repeated":
            given["action"] = "append"
        elif option.several == "words":
            given["nargs"] = option.count
            if isinstance(option.count, int) and metavar is not None:
                metavar = tuple(str(metavar).split())
    elif option.bare or (option.place and not needed):
        given |= {"nargs": "?", "const": option.bare or None}
    if kinds != [bool]:
        given["metavar"] = metavar or name.rpartition("_")[2].upper()
    if option.place:
        action = parser.add_argument(name, **given)
    else:
        names = [option.spelling(name), *([option.short] if option.short else [])]
        action = parser.add_argument(*names, dest=name, required=needed, **given)
    action.offered = _offered(kinds)  # type: ignore[attr-defined]
    return action


def _offered(kinds: Sequence[Any]) -> tuple[object, ...] | type[Path] | None:
    """Completions of a shell for an argument of these kinds: choices, or any file."""
    if kinds and typing.get_origin(kinds[0]) in (tuple, collections.abc.Sequence):
        return _offered(members(typing.get_args(kinds[0])[0]))
    if {Path, os.PathLike[str]} & set(kinds):
        return Path
    choices = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    return tuple(map(str, typing.get_args(choices[0]))) if choices else None


def sentence(summary: str) -> str:
    """A summary as the first line of a help text; names keep their capital letters."""
    return f"{summary[:1].upper()}{summary[1:]}"


class _Version(argparse._VersionAction):
    """Looks up the version on demand: other runs need none."""

    def __call__(self, *given: Any) -> None:
        from ...recipes.packages import package_version

        self.version = f"draftquant {package_version('draftquant')}"
        super().__call__(*given)


_FLAGS = (
    (("--json",), "print JSON on stdout, errors too"),
    (("-q", "--quiet"), "print nothing on stderr but warnings and errors"),
    (("-v", "--verbose"), "print the versions that run, and how long each phase took"),
    (("--debug",), "print the traceback of an error"),
)
_IN_SHORT = (
    "-h/--help, -V (version), --json (JSON on stdout), -q/--quiet, -v/--verbose, --debug"
    " (tracebacks)"
)
"""What `--help` says about all common options."""
COMMON = {names[-1].strip("-"): False for names, _ in _FLAGS}
"""The common options where none is given."""


def add_common_options(parser: CommandParser) -> None:
    """The common options, which may come before or after the name of a command."""
    parser.group_options()
    group = parser.add_argument_group()
    parser._action_groups.remove(group)  # help says them in short
    group.add_argument("-h", "--help", action="help", help="show this and stop")
    for names, summary in _FLAGS:
        if not parser.has(names[-1]):
            group.add_argument(*names, action="store_true", help=summary)
        parser.keep(names[-1])
    # check --version is the engine's
    names = ("-V",) if parser.has("--version") else ("-V", "--version")
    group.add_argument(*names, action=_Version, help="show the version and stop")
    parser.common = group._group_actions
    for below in dict.fromkeys(parser.commands.values()):
        add_common_options(below)
