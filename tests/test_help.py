"""Parsers and their help: groups, two screens, examples, what was meant; nothing heavy loads."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from draftquant.scripts.cli import every_parser, main
from draftquant.scripts.command_table import COMMANDS, EXAMPLES, GROUPS
from draftquant.scripts.frame.help_text import COMMON, NEEDED, RARE
from draftquant.scripts.frame.help_text import GROUPS as OPTION_GROUPS
from draftquant.scripts.frame.parsers import CommandParser, UsageError

LIST, PAGE = 56, 102
"""Lines of the list of commands, and of a command's own help: one screen, and two."""


def commands(parser: CommandParser) -> Iterator[CommandParser]:
    """The parser and all below it."""
    yield parser
    for below in parser.commands.values():
        yield from commands(below)


WHOLE = every_parser()
ALL = {parser.prog.partition(" ")[2]: parser for parser in commands(WHOLE)}
LEAVES = [parser for parser in ALL.values() if not parser.commands]


def test_the_list_of_commands_is_one_screen_of_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [name for group in GROUPS.values() for name in group]
    assert len(named) == len(set(named)) == len(COMMANDS)
    assert set(named) == set(WHOLE.commands)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LIST
    for title, group in GROUPS.items():
        below = lines[lines.index(f"{title}:") + 1 :][: len(group)]
        assert [line.split(maxsplit=1) for line in below] == [[*each] for each in group.items()]


def test_every_page_of_help_is_two_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in ALL.items():
        shown = parser.format_help()
        usage, *lines = shown.splitlines()
        assert not [line for line in lines if len(line) > 80]
        assert -(-len(usage) // 80) + len(lines) <= PAGE
        assert not [line for line in lines if line.endswith("-")]  # names of options stay whole
        for option in ("-h/--help", "--json", "-q/--quiet", "-v/--verbose", "-V", "--debug"):
            assert option in shown
        assert f"  {EXAMPLES[name][0]}\n" in shown.replace(" \\\n    ", " ")


def test_every_example_parses() -> None:
    for example in (each for examples in EXAMPLES.values() for each in examples):
        WHOLE.parse_args(shlex.split(example.partition(">")[0])[1:])


def test_what_is_needed_comes_first_and_then_what_is_common() -> None:
    order = [NEEDED, *OPTION_GROUPS, RARE]
    assert order[1] == COMMON
    for parser in LEAVES:
        shown = [group.title for group in parser._action_groups if group._group_actions]
        headings = [order.index(title) for title in shown if title in order]
        assert headings == sorted(headings)
        assert not (headings and "options" in shown)
        groups = [g for g in parser._action_groups if g.title in (*order, "options")]
        count = sum(len(group._group_actions) for group in groups)
        assert bool(headings) == (count > 8), parser.prog
        for action in parser._actions:
            assert action.help, action.dest


def test_common_options_count_wherever_they_stand() -> None:
    for given in (["-q", "recipes", "list"], ["recipes", "list", "-q"]):
        assert WHOLE.parse_args(given, namespace=argparse.Namespace(quiet=False)).quiet


WRONG = (
    "quantise x", "traces splti t", "plan d --recipie=r", "plan d -z --recipe r", "plan d",
    "plan d e --recipe r", "gate a --traces t b", "quantize d fp8-ptpc out", "record --verifier m",
    "quantize --model d", "check d --engine vlm", "check d --engine zzz", "check d --tp two",
    "estimate d --efficiency lots", "traces split t --out a b --fraction x", "plan d --recipe",
    "record --to 3",
)  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
def test_usage_errors_say_what_was_meant(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        WHOLE.parse_args(shlex.split(given))
    assert caught.value.usage.startswith("usage: draftquant ")


@pytest.mark.parametrize(("given", "code"), [
    (["help", "parity", "drft"], 2),
    (["plan", "-V"], 0),
    (["quan\x1b[2Jtise"], 2),  # from elsewhere: it must not write to the terminal
])  # fmt: skip
def test_what_ends_at_once(given: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == code
    assert "\x1b" not in "".join(capsys.readouterr())


HEAVY = {"torch", "transformers", "numpy", "scipy", "huggingface_hub", "jinja2",
         "importlib.metadata"}  # fmt: skip
"""What no help needs."""
MODULES = {"--help": 30, "check --help": 225, "quantize --help": 150, "gate --help": 85}
"""Command line -> how many modules of ours it may import: each costs about 0.4 ms."""


def test_help_imports_little() -> None:
    script = f"""
import os, sys
from draftquant.scripts.cli import every_parser, main
for words in {[*MODULES, "every page"]!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    printed, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")
    try:
        every_parser().format_help() if words == "every page" else main(words.split())
    except SystemExit:
        pass
    ours = sum(name.startswith("draftquant") for name in sys.modules)
    print(words, ours, *({HEAVY!r} & sys.modules.keys()), sep=",", file=printed, flush=True)
    os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = {words: rest for words, *rest in (line.split(",") for line in run.stdout.splitlines())}
    assert found.keys() == {*MODULES, "every page"}
    assert {words: heavy for words, (_, *heavy) in found.items() if heavy} == {}
    assert {w: n for w, (n, *_) in found.items() if int(n) > MODULES.get(w, 999)} == {}
