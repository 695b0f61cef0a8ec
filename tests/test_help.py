"""Help: every command in one group, every page on two screens, nothing heavy loaded to show it."""

import subprocess
import sys

import pytest
from draftquant.scripts.cli import COMMANDS, every_parser, main
from draftquant.scripts.command_table import GROUPS
from draftquant.scripts.frame.help_text import COMMON, NEEDED, RARE
from draftquant.scripts.frame.help_text import GROUPS as OPTION_GROUPS
from test_parsers import ALL, LEAVES

LIST, PAGE = 56, 102
"""Lines of the list of commands, and of a command's own help: one screen, and two."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_command_is_in_one_group() -> None:
    named = [name for group in GROUPS.values() for name in group]
    assert len(named) == len(set(named)) == len(COMMANDS)
    assert set(named) == set(every_parser().commands)
    assert list(GROUPS) == ["look", "make", "convert", "judge", "serve", "ship", "housekeeping"]


def test_the_list_of_commands_is_one_screen_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LIST
    assert all(len(line) <= 80 for line in lines)
    at = [lines.index(f"{title}:") for title in GROUPS]
    assert at == sorted(at)
    for title, group in GROUPS.items():
        below = lines[lines.index(f"{title}:") + 1 :][: len(group)]
        assert [line.split()[0] for line in below] == list(group)
        assert [line.split(maxsplit=1)[1] for line in below] == list(group.values())


def test_every_page_of_help_is_two_screens() -> None:
    for parser in ALL.values():
        usage, *lines = parser.format_help().splitlines()
        assert not [line for line in lines if len(line) > 80]
        assert -(-len(usage) // 80) + len(lines) <= PAGE
        assert not [line for line in lines if line.endswith("-")]  # names of options stay whole


def test_what_is_needed_comes_first_and_then_what_is_common() -> None:
    order = [NEEDED, *OPTION_GROUPS, RARE]
    assert order[1] == COMMON
    for parser in LEAVES.values():
        shown = [group.title for group in parser._action_groups if group._group_actions]
        headings = [order.index(title) for title in shown if title in order]
        assert headings == sorted(headings)
        assert not (headings and "options" in shown)


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["gat"], "draftquant gate"), (["parity", "drft"], "draftquant parity draft")],
)
def test_help_says_which_command_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["help", *words])
    assert exit_.value.code == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "huggingface_hub",
    "jinja2",
    "importlib.metadata",
}
"""What no help needs."""
MODULES = {
    "--help": 30,
    "inspect --help": 65,
    "check --help": 225,
    "plan --help": 145,
    "quantize --help": 150,
    "verify --help": 70,
    "gate --help": 85,
    "replay --help": 80,
    "measure --help": 80,
}
"""Command line -> how many modules of ours it may import: each costs about 0.4 ms."""


def test_help_imports_little() -> None:
    script = f"""
import os, sys
from draftquant.scripts.cli import main
for words in {list(MODULES)!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    printed, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")
    try:
        main(words.split())
    except SystemExit:
        ours = sum(name.startswith("draftquant") for name in sys.modules)
        print(words, ours, *({HEAVY!r} & sys.modules.keys()), sep=",", file=printed, flush=True)
    os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = {words: rest for words, *rest in (line.split(",") for line in run.stdout.splitlines())}
    assert found.keys() == MODULES.keys()
    assert {words: heavy for words, (_, *heavy) in found.items() if heavy} == {}
    assert {w: n for w, (n, *_) in found.items() if int(n) > MODULES[w]} == {}


def test_no_help_of_any_command_is_heavy() -> None:
    script = (
        "import sys; from draftquant.scripts.cli import every_parser; every_parser().format_help();"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize(("given", "what", "fix"), [
    (["quantize", "d", "fp8-ptpc", "out"],
     "2 arguments too many: 'fp8-ptpc', 'out'; and --recipe, --out is missing",
     "draftquant quantize d --recipe fp8-ptpc --out out"),
    (["quantize", "--model", "d"], "has no option --model", "DRAFT is given by its place"),
    (["gate", "--trace-s", "d"], "has no option --trace-s", "did you mean --traces?"),
])  # fmt: skip
def test_arguments_in_the_wrong_place(
    given: list[str], what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert what in said
    assert fix in said
