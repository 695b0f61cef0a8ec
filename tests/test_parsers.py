"""Parsers: what was meant, the usage of the very command, examples that parse, common options."""

import argparse
import shlex
from collections.abc import Iterator

import pytest
from draftquant.scripts.cli import every_parser, main
from draftquant.scripts.command_table import EXAMPLES
from draftquant.scripts.frame.help_text import GROUPS
from draftquant.scripts.frame.parsers import CommandParser, UsageError


def commands(parser: CommandParser) -> Iterator[CommandParser]:
    """The parser and all below it."""
    yield parser
    for below in parser.commands.values():
        yield from commands(below)


WHOLE = every_parser()
ALL = {parser.prog.partition(" ")[2]: parser for parser in commands(WHOLE)}
LEAVES = {name: parser for name, parser in ALL.items() if not parser.commands}


def test_every_command_has_examples_and_the_common_options() -> None:
    for name, parser in ALL.items():
        assert parser.examples == EXAMPLES[name]
        shown = parser.format_help()
        for option in ("-h/--help", "--json", "-q/--quiet", "-v/--verbose", "-V", "--debug"):
            assert option in shown
        assert f"  {parser.examples[0]}\n" in shown.replace(" \\\n    ", " ")


def test_every_example_parses() -> None:
    for example in (each for examples in EXAMPLES.values() for each in examples):
        given = shlex.split(example.partition(">")[0])
        assert given[0] == "draftquant"
        WHOLE.parse_args(given[1:])


def test_metavars_are_words_and_every_option_says_something() -> None:
    for action in (each for parser in LEAVES.values() for each in parser._actions):
        assert action.help, action.dest
        if action.option_strings and isinstance(action.metavar, str):
            assert len(action.metavar) > 1 or action.metavar == "K", action.option_strings


def test_options_of_large_commands_stand_under_headings() -> None:
    shown = ALL["quantize"].format_help()
    needed, how = shown.index("\nneeded:"), shown.index("\nhow it is quantized:")
    assert needed < shown.index("  --recipe RECIPE") < shown.index("  --out FOLDER") < how
    assert how < shown.index("  --input-scale SCALE")
    assert "needed:" not in ALL["verify"].format_help()
    named = [option for options in GROUPS.values() for option in options]
    assert len(named) == len(set(named))


def test_usage_has_what_must_be_given_and_nothing_else() -> None:
    assert ALL["verify"].format_usage() == (
        "usage: draftquant verify QUANT --against DRAFT [options]\n"
    )
    assert ALL["traces"].format_usage() == "usage: draftquant traces VERB ...\n"
    assert ALL["traces split"].format_usage() == (
        "usage: draftquant traces split TRACES --out A B [options]\n"
    )


@pytest.mark.parametrize(
    "given", [["-q", "recipes", "list"], ["recipes", "-q", "list"], ["recipes", "list", "-q"]]
)
def test_common_options_count_wherever_they_stand(given: list[str]) -> None:
    options = argparse.Namespace(quiet=False)
    WHOLE.parse_args(given, namespace=options)
    assert options.quiet


@pytest.mark.parametrize("given", [["-V"], ["--version"], ["plan", "-V"], ["check", "-V"]])
def test_version(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("draftquant ")


WRONG = (
    ("quantise x", "draftquant", "no command 'quantise'", "'draftquant quantize'"),
    ("zzz", "draftquant", "no command 'zzz'", "see 'draftquant help'"),
    ("traces splti t", "draftquant traces", "no command", "'draftquant traces split'"),
    ("--jsn recipes", "draftquant", "no option --jsn", "did you mean --json?"),
    ("plan d --recipie=r", "draftquant plan", "no option --recipie", "--recipe?"),
    ("plan d --zzz", "draftquant plan", "no option --zzz", "lists the options"),
    ("plan d -z --recipe r", "draftquant plan", "no option -z", "lists the options"),
    ("plan d", "draftquant plan", "missing: --recipe", "for example: draftquant plan"),
    ("plan d e --recipe r", "draftquant plan", "one argument too many: 'e'", "leave it out"),
    ("gate a --traces t b", "draftquant gate", "too many: 'b'", "BF16 QUANT side by side"),
    ("check d --engine vlm", "--engine", "expected one of vllm", "did you mean vllm?"),
    ("check d --engine zzz", "--engine", "got 'zzz'", "see 'draftquant check --help'"),
    ("check d --tp two", "--tp", "expected a whole number, got 'two'", "--tp 4"),
    ("estimate d --efficiency lots", "--efficiency", "expected a number", "--efficiency 0.5"),
    ("traces split t --out a b --fraction x", "--fraction", "expected a share", "--help"),
    ("plan d --recipe", "--recipe", "expected one argument", "for example"),
    ("record --to 3", "draftquant record", "ambiguous option", "write the option out"),
)  # fmt: skip


def test_usage_errors_say_what_was_meant() -> None:
    for given, where, what, fix in WRONG:
        with pytest.raises(UsageError) as caught:
            WHOLE.parse_args(shlex.split(given))
        assert caught.value.usage.startswith("usage: draftquant ")
        assert caught.value.where == where
        assert what in caught.value.what
        assert fix in caught.value.fix


def test_a_command_line_from_elsewhere_cannot_write_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["quan\x1b[2Jtise"])
    assert exit_.value.code == 2
    assert "\x1b" not in capsys.readouterr().err
