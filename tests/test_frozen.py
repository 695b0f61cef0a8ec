"""What the frozen run rests on: every verb is in it, and differences are named."""

from pathlib import Path

from draftquant.scripts.command_table import COMMANDS
from frozen.outcomes import Outcome, differences, read_outcomes
from frozen.scenes import read_scenes

FROZEN = Path(__file__).with_name("frozen")
SCENES = read_scenes(FROZEN / "commands.toml")


def test_every_verb_is_run_and_every_command_has_an_expectation() -> None:
    lines = [line for scene in SCENES.values() for line in scene.commands.values()]
    assert {line.split()[0] for line in lines} >= set(COMMANDS)
    commands = {f"{name}/{key}" for name, scene in SCENES.items() for key in scene.commands}
    assert set(read_outcomes(FROZEN / "expected.json")) == commands | {"arithmetic"}
    assert "check-gpu-fp8-ptpc-sglang-mi325x" in SCENES["llama-plain"].commands


def test_differences_are_named() -> None:
    before = Outcome(0, {"text": "a"}, {"config.json": "b", "model.safetensors": "c"})
    now = Outcome(1, {"text": "a"}, {"config.json": "d"})
    assert differences(before, now) == {
        "exit code": ("0", "1"),
        "config.json": ("b", "d"),
        "model.safetensors": ("c", "nothing"),
    }
    assert differences(now, now) == {}
    assert differences(None, now)["exit code"] == ("nothing", "1")
