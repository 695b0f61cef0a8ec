"""Shells complete commands, flags, choices and recipes: asked of a real bash."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest
from draftquant.recipes import aliases, built_in_recipes
from draftquant.scripts.cli import COMMANDS, main
from draftquant.scripts.verbs.completion import Shell

BASH = ("bash", "--norc", "-c")
ASK = """
source "$1"; shift
function=$(complete -p draftquant | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$function" draftquant "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def scripts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    for shell in typing.get_args(Shell):
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out, encoding="utf-8")
    return tmp_path


def test_bash_completes_commands_flags_choices_and_recipes(scripts: Path) -> None:
    def completed(*words: str) -> set[str]:
        asked = [*BASH, ASK, "bash", str(scripts / "bash"), "draftquant", *words]
        return set(subprocess.check_output(asked, text=True, cwd=scripts).split())

    (scripts / "mine.yaml").write_text("", encoding="utf-8")
    assert completed("") >= set(COMMANDS)
    assert completed("quan") == {"quantize"}
    assert completed("quantize", "d", "--rec") == {"--recipe"}
    assert completed("check", "d", "--engine", "") == {"vllm", "sglang", "tensorrt-llm"}
    mi3 = {name for name in (*aliases(), *built_in_recipes()) if name.startswith("mi3")}
    assert completed("recipes", "show", "mi3") == mi3
    assert completed("quantize", "d", "--recipe", "min") == {"mine.yaml"}


def test_the_other_shells_are_told_the_same(scripts: Path) -> None:
    for shell in ("zsh", "fish"):
        script = (scripts / shell).read_text(encoding="utf-8")
        for name in (*COMMANDS, *aliases(), *built_in_recipes(), "tensorrt-llm"):
            assert name in script


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
