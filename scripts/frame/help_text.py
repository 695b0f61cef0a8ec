"""The look of `--help`: usage in one line, commands in groups, examples as a shell takes them."""

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...recipes.packages import table_beside


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Usage in one line has what is required; the list below has the rest."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Only required arguments, in any order of groups."""
        needed = [each for each in actions if each.required or not each.option_strings]
        needed.sort(key=lambda each: bool(each.option_strings))
        del groups
        if usage is None and prefix is None:
            # argparse puts positional arguments after options, where commas of nargs="+" end.
            parts = [self._format_needed(each) for each in needed]
            usage = " ".join(["%(prog)s", *parts, "[options]"])
            if any(each.nargs == argparse.PARSER for each in needed):
                usage = usage.removesuffix(" [options]")
        super().add_usage(usage, needed, [], prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break between words, never inside `--max-new-tokens`."""
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_needed(self, action: argparse.Action) -> str:
        metavar = self._get_default_metavar_for_positional(action)
        if action.option_strings:
            metavar = self._get_default_metavar_for_optional(action)
            return f"{action.option_strings[0]} {self._format_args(action, metavar)}".strip()
        return self._format_args(action, metavar)


def listed(groups: Mapping[str, Mapping[str, str]], columns: int) -> Iterator[str]:
    """Lines of commands in groups: heading -> name -> summary."""
    width = max((len(name) for group in groups.values() for name in group), default=0)
    for title, group in groups.items():
        yield f"{title}:"
        for name, summary in group.items():
            first, beside = f"  {name:<{width}}  ", " " * (width + 4)
            yield textwrap.fill(summary, columns, initial_indent=first, subsequent_indent=beside)


def wrapped(examples: Sequence[str], columns: int) -> Iterator[str]:
    """Each example in one line, or in several as a shell takes them."""
    for example in examples:
        lines = textwrap.wrap(
            example, columns - 2, initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        yield " \\\n".join(lines)


# ---- Headings under which `--help` shows options, for commands with many of them

MANY = 8
"""Number of options that need no headings."""
NEEDED, COMMON, RARE = "needed", "common", "rarely needed"
GROUPS: Mapping[str, Sequence[str]] = table_beside(__file__)
"""Heading -> names of options, the most used heading first."""


def heading(option: argparse.Action) -> str:
    """The heading of an option."""
    if option.required:
        return NEEDED
    words = {option.dest, f"{option.dest} {option.metavar}"}
    return next((title for title, names in GROUPS.items() if words & set(names)), RARE)
